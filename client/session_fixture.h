// What the session's tests have in common: one rank against a fake daemon.
#ifndef SHARDD_CLIENT_SESSION_FIXTURE_H_
#define SHARDD_CLIENT_SESSION_FIXTURE_H_

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/fake_daemon.h"

namespace shardd {

class SessionTest : public testing::Test {
 protected:
  SessionTest() {
    char pattern[] = "/tmp/session_test_XXXXXX";
    directory_ = mkdtemp(pattern);
    socket_ = directory_ + "/s";
    daemon_ = std::make_unique<FakeDaemon>(socket_);
    job_.name = "job";
    job_.grad_dtype = DType::kFloat32;
    job_.weight_dtype = DType::kFloat32;
    job_.chunk_elements = 4096;
    job_.bucket_elements = 4096;
    job_.groups[0].lr = 0.5;
    job_.step_timeout = absl::Seconds(30);
    job_.join_timeout = absl::Seconds(30);
    parameters_ = {{"a", {5000}, 0, {}, {}}, {"b", {3, 4}, 0, {}, {}}, {"c", {6000}, 0, {}, {}}};
  }
  ~SessionTest() override {
    daemon_.reset();
    rmdir(directory_.c_str());
  }

  absl::StatusOr<std::unique_ptr<Session>> Open(uint32_t rank = 0, uint32_t world_size = 1) {
    SessionOptions options;
    options.address = socket_;
    options.rank = rank;
    options.world_size = world_size;
    options.connect_timeout = connect_timeout_;
    options.reconnect_timeout = reconnect_timeout_;
    options.log = [this](const std::string& line) {
      log_ += line + "\n";
      if (on_log_) on_log_(line);
    };
    return Session::Open(options, job_, parameters_);
  }

  // Opens one rank and uploads element i of parameter p as 10 p + i / 1024.
  std::unique_ptr<Session> OpenReady() {
    auto session = Open();
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    for (size_t p = 0; p < parameters_.size() && (*session)->initialising(); ++p) {
      const absl::Status status = (*session)->Upload(p, 0, Initial(p));
      EXPECT_TRUE(status.ok()) << status;
    }
    EXPECT_TRUE((*session)->FinishUpload().ok());
    return *std::move(session);
  }
  std::vector<float> Initial(size_t parameter) const {
    uint64_t count = 1;
    for (int64_t extent : parameters_[parameter].shape) count *= static_cast<uint64_t>(extent);
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      values[i] = 10.0f * static_cast<float>(parameter) + static_cast<float>(i) / 1024.0f;
    }
    return values;
  }

  absl::Status Give(Session* session, size_t parameter, uint32_t slot, float value = 1.0f) {
    absl::StatusOr<void*> grad = session->AcquireGrad(parameter, slot);
    if (!grad.ok()) return grad.status();
    std::fill_n(static_cast<float*>(*grad), session->parameter_elements(parameter), value);
    return session->ReadyGrad(parameter, slot);
  }
  absl::Status GiveAll(Session* session) {
    absl::Status status;
    for (uint32_t slot = session->slots().lo; slot < session->slots().hi; ++slot) {
      for (size_t p = parameters_.size(); p-- > 0;) status.Update(Give(session, p, slot));
    }
    return status;
  }
  StepReport Report(const Session& session, const std::string& blob = "") const {
    StepReport report;
    report.slots.resize(session.slots().hi - session.slots().lo);
    report.blob = blob;
    return report;
  }

  void ExpectRegrouped(const absl::Status& status, uint64_t next_step, const std::string& blob) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    const std::optional<Regrouped> regrouped = GetRegrouped(status);
    ASSERT_TRUE(regrouped.has_value()) << status;
    EXPECT_EQ(regrouped->next_step, next_step);
    EXPECT_EQ(regrouped->blob, blob);
  }

  std::string directory_, socket_, log_;
  std::function<void(const std::string&)> on_log_;
  absl::Duration connect_timeout_ = absl::Seconds(20);
  absl::Duration reconnect_timeout_ = absl::Seconds(30);
  std::unique_ptr<FakeDaemon> daemon_;
  JobOptions job_;
  std::vector<ParameterSpec> parameters_;
};

// At step 2, after a decided step 1 with the blob "blob 1".
class RegroupTest : public SessionTest {
 protected:
  void Begin() {
    session_ = OpenReady();
    ASSERT_TRUE(GiveAll(session_.get()).ok());
    ASSERT_TRUE(session_->EndStep(Report(*session_, "blob 1")).ok());
    ASSERT_TRUE(session_->WaitDecision().ok());
  }
  // The verb regrouped; the step can be computed as if nothing had been.
  void ExpectFresh(const absl::Status& status) {
    ExpectRegrouped(status, 2, "blob 1");
    EXPECT_EQ(session_->next_step(), 2u);
    EXPECT_EQ(session_->blob(), "blob 1");
    EXPECT_EQ(session_->generation(), daemon_->generation());
    ASSERT_TRUE(session_->WaitWeights(0).ok());
    for (size_t p = 0; p < 3; ++p) ASSERT_TRUE(Give(session_.get(), p, 0, 4.0f).ok());
    ASSERT_TRUE(session_->EndStep(Report(*session_)).ok());
    const absl::StatusOr<Decision> decision = session_->WaitDecision();
    ASSERT_TRUE(decision.ok()) << decision.status();
    EXPECT_EQ(decision->step, 2u);
    // Nothing of what was given before the change came in.
    EXPECT_EQ(daemon_->Sum(2)[0], 4.0f);
  }
  std::unique_ptr<Session> session_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_SESSION_FIXTURE_H_
