// The daemon and several ranks as threads of one process: what the sanitizers need to
// see the hand-over of memory between them. Everything goes through the sockets all the
// same.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <thread>

#include "client/cli/admin_channel.h"
#include "server/config/config.h"
#include "server/daemon.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"

namespace shardd::test {
namespace {

constexpr uint64_t kSteps = 12;
constexpr uint32_t kSlots = 4;

// More than one bucket, and parameters that buckets cut.
std::vector<ParameterSpec> Parameters() {
  std::vector<ParameterSpec> parameters(3);
  parameters[0].name = "a";
  parameters[0].shape = {90, 100};
  parameters[1].name = "b";
  parameters[1].shape = {};
  parameters[2].name = "c";
  parameters[2].shape = {5000};
  return parameters;
}

float Gradient(uint64_t step, uint32_t slot, size_t parameter, uint64_t element) {
  return static_cast<float>((step * 7 + slot * 3 + parameter * 5 + element) % 11) - 5.0f;
}

class OneProcess : public ::testing::Test {
 protected:
  OneProcess() {
    DaemonOptions options;
    options.log = [](const std::string&) {};
    options.config.mutable_listen()->set_socket(sockets_.path() + "/d.sock");
    options.config.mutable_store()->set_directory(state_.path() + "/state");
    options.config.mutable_memory()->set_budget_bytes(256 << 20);
    options.config.mutable_step()->set_threads(2);
    options.config.set_job_ttl_seconds(-1);
    config::FillDefaults(geteuid(), "", &options.config);
    absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(std::move(options));
    EXPECT_TRUE(daemon.ok()) << daemon.status();
    if (daemon.ok()) daemon_ = *std::move(daemon);
  }

  JobOptions Job(const std::string& name) const {
    JobOptions job = SmallJob(name, kSlots);
    job.stage = stage_;
    job.weights = weights_;
    job.heartbeat = absl::Milliseconds(200);
    return job;
  }

  // Trains until kSteps are committed. `after` is called after each decision; when it
  // returns true the session is dropped as by a death, and opened again.
  void Train(const std::string& job, uint32_t rank, uint32_t world,
             const std::function<bool(const Decision&)>& after = nullptr) {
    auto session = OpenRank(daemon_->socket(), rank, world, Job(job), Parameters(), 1.0f);
    while (session->next_step() <= kSteps) {
      absl::StatusOr<Decision> decision = Step(session.get());
      if (GetRegrouped(decision.status())) continue;
      ASSERT_TRUE(decision.ok()) << "rank " << rank << ": " << decision.status();
      if (after && after(*decision)) {
        session.reset();
        session = OpenAgain(rank, world, Job(job));
        ASSERT_NE(session, nullptr);
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (rank == 0) {
      for (size_t p = 0; p < session->num_parameters(); ++p) {
        masters_[job].push_back(ReadAll(session.get(), StateKind::kMaster, p));
      }
    }
    EXPECT_TRUE(session->Close().ok());
  }

  // Its place is this living process's until the daemon has seen the socket close.
  std::unique_ptr<Session> OpenAgain(uint32_t rank, uint32_t world, const JobOptions& job) {
    while (true) {
      auto session = Session::Open(RankOptions(daemon_->socket(), rank, world), job, Parameters());
      if (session.ok()) {
        EXPECT_TRUE((*session)->FinishUpload().ok());
        return *std::move(session);
      }
      if (!absl::IsAlreadyExists(session.status())) {
        ADD_FAILURE() << session.status();
        return nullptr;
      }
    }
  }

  // Forward as a trainer would: every parameter gathered, read, released. Then backward.
  absl::StatusOr<Decision> Step(Session* session) {
    for (size_t p = 0; p < session->num_parameters(); ++p) {
      const size_t one[] = {p};
      if (absl::Status status = session->Gather(one); !status.ok()) return status;
      absl::StatusOr<const void*> weights = session->WaitWeights(p);
      if (!weights.ok()) return weights.status();
      double sum = 0;
      for (uint64_t i = 0; i < session->parameter_elements(p); ++i) {
        sum += static_cast<const float*>(*weights)[i];
      }
      EXPECT_TRUE(std::isfinite(sum));
      if (absl::Status status = session->Release(one); !status.ok()) return status;
    }
    const uint64_t step = session->next_step();
    return TakeStep(session, DType::kFloat32, [step](uint32_t slot, size_t p, uint64_t i) {
      return Gradient(step, slot, p, i);
    });
  }

  TempDir sockets_{"/tmp"};
  TempDir state_{"/dev/shm"};
  std::unique_ptr<Daemon> daemon_;
  int stage_ = 2;
  WeightsMode weights_ = WeightsMode::kShared;
  std::mutex mutex_;
  std::map<std::string, std::vector<std::vector<float>>> masters_;
};

TEST_F(OneProcess, RanksOfTwoJobsWhileSomebodyLooks) {
  std::atomic<bool> done = false;
  std::thread looker([&] {
    auto channel = cli::AdminChannel::Connect(daemon_->socket(), absl::Seconds(10));
    ASSERT_TRUE(channel.ok()) << channel.status();
    while (!done) {
      auto jobs = (*channel)->Call(&v1::Admin::StubInterface::ListJobs, v1::ListJobsRequest());
      ASSERT_TRUE(jobs.ok()) << jobs.status();
      for (const v1::JobStatus& job : jobs->jobs()) EXPECT_LE(job.applied(), kSteps);
      auto info = (*channel)->Call(&v1::Admin::StubInterface::ServerInfo, v1::ServerInfoRequest());
      ASSERT_TRUE(info.ok()) << info.status();
    }
  });
  // The same training on 4 ranks and on 1, at once.
  std::thread other([&] { Train("one", 0, 1); });
  ForEachRank(4, [&](uint32_t rank) { Train("four", rank, 4); });
  other.join();
  done = true;
  looker.join();
  ASSERT_EQ(masters_["four"].size(), 3u);
  EXPECT_EQ(masters_["four"], masters_["one"]);
}

TEST_F(OneProcess, PrivateWeightsAtStage3) {
  Train("shared", 0, 1);
  stage_ = 3;
  weights_ = WeightsMode::kPrivate;
  ForEachRank(2, [&](uint32_t rank) { Train("private", rank, 2); });
  EXPECT_EQ(masters_["private"], masters_["shared"]);
}

TEST_F(OneProcess, ARankThatLeavesWithoutAWordAndComesBack) {
  Train("calm", 0, 1);
  std::atomic<int> deaths = 0;
  ForEachRank(2, [&](uint32_t rank) {
    Train("stormy", rank, 2, [&](const Decision& decision) {
      bool dies = decision.step % 4 == rank * 2 + 1 && decision.step < kSteps;
      deaths += dies ? 1 : 0;
      return dies;
    });
  });
  EXPECT_GE(deaths, 4);
  EXPECT_EQ(masters_["stormy"], masters_["calm"]);
}

TEST_F(OneProcess, ADaemonThatEndsAnswersThoseWhoWait) {
  auto session = OpenRank(daemon_->socket(), 0, 1, Job("cut"), Parameters());
  // One rank of a group of two, waiting for the other.
  std::thread waiting([&] {
    auto alone = Session::Open(RankOptions(daemon_->socket(), 0, 2), Job("alone"), Parameters());
    EXPECT_FALSE(alone.ok());
  });
  auto channel = cli::AdminChannel::Connect(daemon_->socket(), absl::Seconds(10));
  ASSERT_TRUE(channel.ok()) << channel.status();
  v1::ListJobsRequest request;
  request.set_name("alone");
  while (true) {
    auto jobs = (*channel)->Call(&v1::Admin::StubInterface::ListJobs, request);
    if (jobs.ok() && jobs->jobs_size() == 1 && jobs->jobs(0).sessions_size() == 1) break;
  }
  daemon_.reset();
  waiting.join();
  EXPECT_FALSE(Step(session.get()).ok());
}

}  // namespace
}  // namespace shardd::test
