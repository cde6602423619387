#include "tests/memory/layered_model.h"

#include <string>
#include <utility>

namespace shardd::test {
namespace {

constexpr int64_t kVocabulary = 4096;
constexpr int64_t kContext = 512;
constexpr int64_t kWidth = 640;
constexpr int kBlocks = 12;

}  // namespace

LayeredModel MakeLayeredModel() {
  LayeredModel model;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    model.layers.back().push_back(model.parameters.size());
    ParameterSpec& spec = model.parameters.emplace_back();
    spec.name = name;
    spec.shape = std::move(shape);
  };
  const auto add_pair = [&](const std::string& name, std::vector<int64_t> shape) {
    const int64_t out = shape.back();
    add(name + ".weight", std::move(shape));
    add(name + ".bias", {out});
  };
  model.layers.emplace_back();
  add("wte.weight", {kVocabulary, kWidth});
  add("wpe.weight", {kContext, kWidth});
  for (int block = 0; block < kBlocks; ++block) {
    const std::string h = "h." + std::to_string(block) + ".";
    model.layers.emplace_back();
    add_pair(h + "ln_1", {kWidth});
    add_pair(h + "attn.c_attn", {kWidth, 3 * kWidth});
    add_pair(h + "attn.c_proj", {kWidth, kWidth});
    add_pair(h + "ln_2", {kWidth});
    add_pair(h + "mlp.c_fc", {kWidth, 4 * kWidth});
    add_pair(h + "mlp.c_proj", {4 * kWidth, kWidth});
  }
  model.layers.emplace_back();
  add_pair("ln_f", {kWidth});
  return model;
}

}  // namespace shardd::test
