// Tries a user's optimizer: what shardd relies on for redo, resharding and equal bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/user_optimizer.h"

namespace shardd::kernels {
namespace {

constexpr float kGuard = 12345.0f;

bool IsName(const char* name) {
  if (name == nullptr) return false;
  const size_t length = strnlen(name, 33);
  return length >= 1 && length <= 32 && std::all_of(name, name + length, [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
         });
}

std::string CheckDescription(const shardd_optimizer_description& d) {
  if (d.abi_version != SHARDD_OPTIMIZER_ABI_VERSION) {
    return "it has ABI version " + std::to_string(d.abi_version) + ", this shardd " +
           std::to_string(SHARDD_OPTIMIZER_ABI_VERSION) +
           "; compile it with this shardd's shardd_optimizer.h";
  }
  if (d.struct_bytes != sizeof(d)) {
    return "its description has " + std::to_string(d.struct_bytes) + " bytes, not " +
           std::to_string(sizeof(d)) + "; compile it with this shardd's shardd_optimizer.h";
  }
  if (!IsName(d.name)) return "its name is not 1 to 32 of [a-z0-9_]";
  if (d.num_states > kMaxStates) {
    return "it has " + std::to_string(d.num_states) + " states; at most " +
           std::to_string(kMaxStates);
  }
  for (uint32_t s = 0; s < d.num_states; ++s) {
    if (!IsName(d.state_names[s])) {
      return "the name of its state " + std::to_string(s) + " is not 1 to 32 of [a-z0-9_]";
    }
    for (uint32_t t = 0; t < s; ++t) {
      if (std::strcmp(d.state_names[s], d.state_names[t]) == 0) {
        return "two of its states are named " + std::string(d.state_names[s]);
      }
    }
    const std::string name = d.state_names[s];
    if (name == "model" || name == "frozen") return "a state cannot be named " + name;
  }
  if (d.step == nullptr || d.update == nullptr) return "it has no step or no update function";
  return "";
}

// A few arrays with a guard behind each.
struct Arrays {
  size_t count;
  std::vector<float> grad, master, state[kMaxStates];

  explicit Arrays(size_t n) : count(n) {
    // Another guard behind each, so that a copy beyond the end shows.
    float guard = kGuard;
    for (auto* array : All()) array->assign(n + 16, guard++);
  }
  std::vector<std::vector<float>*> All() {
    return {&grad, &master, &state[0], &state[1], &state[2]};
  }
  bool operator==(const Arrays& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(grad, other.grad) && same(master, other.master) && same(state[0], other.state[0]) &&
           same(state[1], other.state[1]) && same(state[2], other.state[2]);
  }
};

class Trial {
 public:
  explicit Trial(const shardd_optimizer_description& d) : d_(d) {}

  std::string Run() {
    const ScopedFlushToZero flush;
    if (std::string problem = TryStep(); !problem.empty()) return problem;
    if (std::string problem = TryFinite(); !problem.empty()) return problem;
    return TryBits();
  }

 private:
  StepScalars ScalarsOf(uint64_t step) const {
    const shardd_hyperparameters hyper{1e-3, 0.9, 0.999, 1e-8, 0.01, 0.9, 0.0, 0.0, 0.0};
    StepScalars scalars{};
    d_.step(&hyper, step, scalars.data());
    return scalars;
  }

  std::string TryStep() const {
    for (const uint64_t step : {uint64_t{1}, uint64_t{2}, uint64_t{1000}, uint64_t{100'000'000}}) {
      const StepScalars once = ScalarsOf(step), again = ScalarsOf(step);
      if (std::memcmp(once.data(), again.data(), sizeof(once)) != 0) {
        return "its step function gives other scalars for the same step when it is called again";
      }
      for (const float scalar : once) {
        if (!std::isfinite(scalar)) {
          return "a scalar of step " + std::to_string(step) +
                 " is not finite with ordinary "
                 "hyper-parameters (lr 1e-3, betas 0.9 and 0.999, eps 1e-8)";
        }
      }
    }
    return "";
  }

  void Update(const StepScalars& scalars, size_t first, size_t count, Arrays* arrays) const {
    float* states[kMaxStates] = {};
    for (uint32_t s = 0; s < d_.num_states; ++s) states[s] = &arrays->state[s][first];
    d_.update(scalars.data(), count, &arrays->grad[first], &arrays->master[first], states);
  }

  // Zero and ordinary gradients from states of 0 for 20 steps.
  std::string TryFinite() const {
    Arrays a(64);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < a.count; ++i) {
      a.master[i] = i < 8 ? 0.0f : normal(random);
      for (auto& state : a.state) state[i] = 0;
    }
    for (uint64_t step = 1; step <= 20; ++step) {
      for (size_t i = 0; i < a.count; ++i) a.grad[i] = i % 4 == 0 ? 0.0f : normal(random);
      Update(ScalarsOf(step), 0, a.count, &a);
      for (auto* array : a.All()) {
        for (size_t i = 0; i < a.count; ++i) {
          if (!std::isfinite((*array)[i])) {
            return "step " + std::to_string(step) + (i % 4 == 0 ? " with a gradient of 0" : "") +
                   " makes a value that is not finite";
          }
        }
      }
    }
    return "";
  }

  Arrays Hostile(size_t count) const {
    Arrays a(count);
    std::mt19937 random(2);
    for (auto* array : a.All()) {
      for (size_t i = 0; i < count; ++i) {
        uint32_t bits = static_cast<uint32_t>(random());
        // Two thirds are about 1.
        if (bits % 3 != 0) bits = (bits & 0x807FFFFFu) | ((110 + bits / 8 % 24) << 23);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        (*array)[i] = std::isnan(value) || std::fabs(value) < 0x1p-125f ? 0.0f : value;
      }
    }
    return a;
  }

  // Repeated, cut and moved, the same bits; and nothing else is touched.
  std::string TryBits() const {
    const StepScalars scalars = ScalarsOf(3);
    for (size_t count = 1; count <= 257; ++count) {
      const Arrays before = Hostile(count);
      Arrays whole = before, again = before, pieces = before;
      Update(scalars, 0, count, &whole);
      Update(scalars, 0, count, &again);
      if (!(whole == again)) return "the same update gives other bits when it is done again";
      if (whole.grad != before.grad && !SameBits(whole.grad, before.grad)) {
        return "it changes the gradient";
      }
      float guard = kGuard;
      for (auto* array : whole.All()) {
        for (size_t i = count; i < array->size(); ++i) {
          if ((*array)[i] != guard) return "it writes beyond the elements that it is given";
        }
        ++guard;
      }
      for (size_t i = 0, length = count % 7 + 1; i < count; i += length, length = length % 29 + 3) {
        Update(scalars, i, std::min(length, count - i), &pieces);
      }
      if (!(whole == pieces)) {
        return "an update in pieces gives other bits than in one: the formula is not element-wise, "
               "or the compiler treats the last elements of an array otherwise";
      }
    }
    return "";
  }

  static bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  const shardd_optimizer_description& d_;
};

}  // namespace

std::string CheckUserOptimizer(const shardd_optimizer_description& description) {
  std::string problem = CheckDescription(description);
  return problem.empty() ? Trial(description).Run() : problem;
}

}  // namespace shardd::kernels
