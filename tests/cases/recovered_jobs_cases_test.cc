// Jobs of every kind and size through the death of the machine: recovered from the journal, they
// go on as if nothing had been.
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/support/daemon_process.h"
#include "tests/support/ranks.h"

namespace shardd::test {
namespace {

constexpr int kBefore = 9, kAfter = 4;

struct Kind {
  std::string name;
  JobOptions job;
  std::vector<std::vector<int64_t>> shapes;
  uint64_t overflow_step = 0;  // a step with an Inf; 0: none
};

std::vector<ParameterSpec> Parameters(const Kind& kind) {
  std::vector<ParameterSpec> parameters(kind.shapes.size());
  for (size_t p = 0; p < parameters.size(); ++p) {
    parameters[p].name = "p" + std::to_string(p);
    parameters[p].shape = kind.shapes[p];
  }
  return parameters;
}

// Multiples of 1/64 below 1: exact in every dtype.
float Gradient(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  const uint64_t h = (step * 131 + slot * 31 + parameter * 17 + element * 7) % 127;
  return static_cast<float>(static_cast<int64_t>(h) - 63) / 64;
}

// All that a trainer can see, as bits.
std::string Seen(Session* session) {
  std::string seen;
  for (size_t p = 0; p < session->num_parameters(); ++p) {
    for (StateKind kind : {StateKind::kMaster, StateKind::kMoment0, StateKind::kMoment1}) {
      const std::vector<float> values = ReadAll(session, kind, p);
      seen.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    }
    seen += std::to_string(*session->ParameterApplied(p)) + ";";
  }
  return seen;
}

void TakeSteps(Session* session, const Kind& kind, int steps, std::string* seen) {
  for (int i = 0; i < steps; ++i) {
    const uint64_t step = session->next_step();
    StepReport report;
    for (uint32_t slot = 0; slot < kind.job.slots; ++slot) report.slots.push_back({1.0, 0});
    const auto decision = TakeStep(
        session, kind.job.grad_dtype,
        [&](uint32_t slot, size_t p, uint64_t i) {
          if (step == kind.overflow_step && p == 0 && i == 0) {
            return std::numeric_limits<float>::infinity();
          }
          return Gradient(step, slot, p, i);
        },
        report);
    ASSERT_TRUE(decision.ok()) << decision.status();
    *seen += std::to_string(decision->step) + " " + std::to_string(decision->grad_norm) + " " +
             std::to_string(decision->loss_scale) + "\n";
  }
}

std::vector<Kind> Kinds() {
  const JobOptions base = [] {
    JobOptions job = SmallJob("toy", 1);
    job.groups[0].beta1 = 0.9;
    return job;
  }();
  std::vector<Kind> kinds;
  kinds.push_back({"NoElements", base, {{0}, {3, 0}}});
  kinds.push_back({"NoParameterWithElementsButOne", base, {{0}, {1}, {0, 7}}});
  kinds.push_back({"OneElement", base, {{1}}});
  kinds.push_back({"OddSizes", base, {{4095}, {4097}, {1}, {3, 5, 7}}});
  kinds.push_back({"SevenSlots", base, {{5000}, {7}}});
  kinds.back().job.slots = 7;
  kinds.push_back({"ReducedInBf16", base, {{9001}, {13}}});
  kinds.back().job.grad_dtype = kinds.back().job.weight_dtype = DType::kBFloat16;
  kinds.push_back({"SevenSlotsOfBf16Clipped", base, {{9001}, {13}}});
  kinds.back().job.slots = 7;
  kinds.back().job.max_norm = 0.5;
  kinds.back().job.grad_dtype = kinds.back().job.weight_dtype = DType::kBFloat16;
  kinds.push_back({"Clipped", base, {{5000}}});
  kinds.back().job.max_norm = 0.25;
  for (const uint64_t overflow : {uint64_t{kBefore}, uint64_t{kBefore - 3}, uint64_t{1}}) {
    const JobOptions fp16 = JobOptions::ForDType(DType::kFloat16);
    kinds.push_back({"Fp16OverflowAt" + std::to_string(overflow), base, {{5000}, {3}}, overflow});
    kinds.back().job.grad_dtype = fp16.grad_dtype;
    kinds.back().job.weight_dtype = fp16.weight_dtype;
    kinds.back().job.loss_scale = fp16.loss_scale;
  }
  kinds.push_back({"ThreeThousandParameters", base, {}});
  for (int64_t p = 0; p < 3000; ++p) kinds.back().shapes.push_back({p % 5});
  return kinds;
}

class RecoveredJobsCases : public testing::TestWithParam<Kind> {};

TEST_P(RecoveredJobsCases, GoOnAsIfNothingHadBeen) {
  const Kind& kind = GetParam();
  const std::vector<ParameterSpec> parameters = Parameters(kind);
  std::string expected;
  {
    DaemonProcess daemon;
    auto session = OpenRank(daemon.socket(), 0, 1, kind.job, parameters, 1.0f);
    TakeSteps(session.get(), kind, kBefore + kAfter, &expected);
    expected += Seen(session.get());
    EXPECT_TRUE(session->Close().ok());
  }
  const TempDir state("/dev/shm"), disk("/tmp");
  const auto start = [&] {
    DaemonProcess::Options options;
    options.state_directory = state.path() + "/state";
    options.flags = {"--journal.directory=" + disk.path() + "/journal",
                     "--journal.segment_bytes=262144", "--journal.log_bytes_max=300000"};
    return std::make_unique<DaemonProcess>(options);
  };
  const auto lose_machine = [&](std::unique_ptr<DaemonProcess>* daemon) {
    kill((*daemon)->pid(), SIGKILL);
    (*daemon)->AwaitDeath();
    daemon->reset();
    std::filesystem::remove_all(state.path() + "/state");
  };
  std::string seen;
  auto daemon = start();
  auto session = OpenRank(daemon->socket(), 0, 1, kind.job, parameters, 1.0f);
  TakeSteps(session.get(), kind, kBefore, &seen);
  EXPECT_TRUE(session->Close().ok());
  lose_machine(&daemon);
  daemon = start();
  ASSERT_TRUE(daemon->HasJob("toy")) << daemon->Log();
  lose_machine(&daemon);  // and again, before anything is done
  daemon = start();
  ASSERT_EQ(daemon->Job("toy").committed_step(), static_cast<uint64_t>(kBefore)) << daemon->Log();
  session = OpenRank(daemon->socket(), 0, 1, kind.job, parameters, 1.0f);
  TakeSteps(session.get(), kind, kAfter, &seen);
  seen += Seen(session.get());
  EXPECT_TRUE(session->Close().ok());
  EXPECT_TRUE(seen == expected) << kind.name;
}

INSTANTIATE_TEST_SUITE_P(All, RecoveredJobsCases, testing::ValuesIn(Kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardd::test
