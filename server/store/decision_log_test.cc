#include "server/store/decision_log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "server/store/job_segments.h"
#include "server/store/state_directory.h"

namespace shardd::store {
namespace {

class DecisionLogTest : public testing::Test {
 protected:
  DecisionLogTest() {
    std::string path = "/dev/shm/shardd-test-XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    root_ = path;
    auto directory = StateDirectory::Open(path + "/state");
    EXPECT_TRUE(directory.ok()) << directory.status();
    directory_ = std::make_unique<StateDirectory>(*std::move(directory));
    std::vector<contract::ParameterSpec> parameters;
    for (int p = 0; p < 70; ++p) parameters.push_back({"p" + std::to_string(p), {4}, 0});
    auto layout = contract::Layout::Create(parameters, {});
    EXPECT_TRUE(layout.ok());
    JobSpec spec;
    spec.config.set_name("log");
    spec.config.set_slots(1);
    spec.config.set_grad_dtype(v1::fp32);
    spec.config.set_weight_dtype(v1::fp32);
    spec.config.add_groups();
    spec.timeline = 77;
    auto segments =
        JobSegments::Create(*directory_, *layout, spec, [](auto*) { return absl::OkStatus(); });
    EXPECT_TRUE(segments.ok()) << segments.status();
    segments_ = *std::move(segments);
  }
  ~DecisionLogTest() override { std::filesystem::remove_all(root_); }

  // A decision whose every part follows from its step, so that a mixture shows.
  static Decision Make(uint64_t step) {
    Decision decision;
    decision.header.sequence = step;
    decision.header.step = step;
    decision.header.applied = step / 2;
    decision.presence = {step, ~step};
    decision.groups = {{1.0 * static_cast<double>(step), 2, 3, 4, 5}};
    decision.blob = std::string(step * 37 % 5000, static_cast<char>('a' + step % 26));
    return decision;
  }

  static void ExpectIs(const Decision& got, uint64_t step) {
    const Decision want = Make(step);
    EXPECT_EQ(got.header.sequence, step);
    EXPECT_EQ(got.header.step, step);
    EXPECT_EQ(got.header.applied, want.header.applied);
    EXPECT_EQ(got.presence, want.presence);
    ASSERT_EQ(got.groups.size(), 1u);
    EXPECT_EQ(got.groups[0].lr, want.groups[0].lr);
    EXPECT_EQ(got.blob, want.blob);
  }

  std::string root_;
  std::unique_ptr<StateDirectory> directory_;
  std::unique_ptr<JobSegments> segments_;
};

TEST_F(DecisionLogTest, BeforeTheFirstAndAfterEach) {
  DecisionLog log(&segments_->job());
  EXPECT_EQ(log.ReadCurrent().header.sequence, 0u);
  for (uint64_t step = 1; step <= 5; ++step) {
    Decision decision = Make(step);
    log.Write(&decision);
    ExpectIs(log.ReadCurrent(), step);
  }
}

TEST_F(DecisionLogTest, ADamagedSlotIsNotTakenAndTheOlderOneIs) {
  DecisionLog log(&segments_->job());
  for (uint64_t step = 1; step <= 4; ++step) {
    Decision decision = Make(step);
    log.Write(&decision);
  }
  const contract::JobHeader* header = segments_->header();
  std::byte* newest = segments_->job().data() + header->decisions_offset;  // slot 4 & 1
  for (size_t at : {size_t{8}, size_t{40}, sizeof(contract::DecisionHeader) + 3,
                    sizeof(contract::DecisionHeader) + 60}) {
    newest[at] ^= std::byte{1};
    ExpectIs(log.ReadCurrent(), 3);
    newest[at] ^= std::byte{1};
    ExpectIs(log.ReadCurrent(), 4);
  }
}

TEST_F(DecisionLogTest, ASlotOfAnotherTimelineIsNotValid) {
  DecisionLog log(&segments_->job());
  Decision decision = Make(1);
  log.Write(&decision);
  segments_->header()->timeline = 78;
  EXPECT_EQ(log.ReadCurrent().header.sequence, 0u);
}

TEST_F(DecisionLogTest, RecordsKeepTheLast1024) {
  DecisionLog log(&segments_->job());
  for (uint64_t step = 1; step <= 1500; ++step) {
    contract::StepRecordEntry record{};
    record.step = step;
    record.loss = static_cast<double>(step);
    log.PutRecord(record);
  }
  EXPECT_EQ(log.Records(1, 1499).size(), 1023u);  // 476 was overwritten by 1500
  const auto records = log.Records(1, 1500);
  ASSERT_EQ(records.size(), 1024u);
  EXPECT_EQ(records.front().step, 477u);
  EXPECT_EQ(records.back().step, 1500u);
  EXPECT_EQ(log.Records(1400, 1410).size(), 11u);
  EXPECT_TRUE(log.Records(1501, 1500).empty());
}

// A child writes decisions as fast as it can and is killed at random moments; what is
// found is one whole decision, never older than the last that it had finished.
TEST_F(DecisionLogTest, SurvivesSigkillAtAnyMoment) {
  DecisionLog log(&segments_->job());
  auto* finished = &segments_->header()->regroups;  // any shared word will do
  unsigned random = 12345;
  uint64_t first = 1;
  for (int kill_count = 0; kill_count < 200; ++kill_count) {
    const pid_t child = fork();
    if (child == 0) {
      for (uint64_t step = first;; ++step) {
        Decision decision = Make(step);
        log.Write(&decision);
        finished->store(step);
      }
    }
    random = random * 1664525 + 1013904223;
    // However busy the machine is, the child gets to write: 2 decisions, or 3, 4, 5.
    const uint64_t at_least = first + 1 + (random >> 30);
    while (finished->load() < at_least) {
    }
    for (unsigned spin = 0; spin < random >> 18; ++spin) finished->load();
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const Decision current = log.ReadCurrent();
    const uint64_t step = current.header.sequence;
    ASSERT_GE(step, finished->load());
    ASSERT_LE(step, finished->load() + 1);
    if (step > 0) ExpectIs(current, step);
    first = step + 1;
  }
  EXPECT_GT(first, 200u);
}

TEST_F(DecisionLogTest, TheDirectoryIsLockedAndListsTheJob) {
  EXPECT_EQ(directory_->JobNames(), std::vector<std::string>{"log"});
  const auto second = StateDirectory::Open(directory_->path());
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  // What an interrupted creation left is removed, what is whole stays.
  std::filesystem::create_directory(directory_->NewJobPath("half"));
  const std::string path = directory_->path();
  directory_.reset();
  auto again = StateDirectory::Open(path);
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(std::filesystem::exists(again->NewJobPath("half")));
  EXPECT_TRUE(std::filesystem::exists(again->JobPath("log")));
}

}  // namespace
}  // namespace shardd::store
