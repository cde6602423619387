// Checkpoints of a job whose chunks lie with several daemons, while its ranks train: each daemon
// writes what it holds, all of the same step.
#include <sys/random.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

using v1::PeerMessage;
using Save = v1::PeerMessage::Save;

namespace {

// For how long a daemon of a save may be out of reach.
constexpr absl::Duration kSilence = absl::Seconds(30);

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

}  // namespace

void Job::BeginSpanSave(uint64_t rate_bytes_per_second, uint32_t keep,
                        Callback<std::shared_ptr<SpanSave>> done) {
  Post([this, rate_bytes_per_second, keep, done] {
    Save arm;
    arm.set_rate_bytes_per_second(rate_bytes_per_second);
    arm.set_keep(keep);
    DoBeginSpanSave(std::move(arm), done);
  });
}

void Job::DoBeginSpanSave(Save arm, const Callback<std::shared_ptr<SpanSave>>& done) {
  const bool ranks =
      std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->live(); });
  // What else may be wrong is said when the copy is to begin.
  if (deleted_ || !LiesElsewhere() || follows() || !ranks) return done(nullptr);
  if (absl::Status status = CanCopy(); !status.ok()) return done(status);
  if (span_->resharding || span_->placement.empty()) {
    return done(absl::UnavailableError(
        absl::StrCat("job '", name(), "': its chunks are moving; save it again in a moment")));
  }
  if (absl::Status status = OthersReached(); !status.ok()) return done(status);
  EndSpanSave(absl::CancelledError("another save of the job begins"));
  std::set<std::string> others = span_->placement.Daemons();
  others.erase(span_->self);
  span_->save = std::make_shared<SpanSave>(RandomU64(), span_->owners_version, std::move(others));
  arm.set_phase(Save::ARM);
  TellSave(*span_->save, std::move(arm));
  done(span_->save);
}

void Job::TellSave(const SpanSave& save, Save order) {
  order.set_save(save.id());
  PeerMessage message;
  message.set_step(decider_.committed_step());
  *message.mutable_save() = std::move(order);
  for (const std::string& daemon : save.others()) Tell(daemon, message);
}

void Job::OrderSave(std::shared_ptr<SpanSave> save, SpanSave::Phase phase) {
  Post([this, save, phase] {
    if (span_ == nullptr || deleted_) return;
    Save order;
    order.set_phase(phase);
    TellSave(*save, std::move(order));
    if (phase >= Save::FINISH && span_->save == save) span_->save = nullptr;
  });
}

void Job::AnswerSave(std::shared_ptr<SpanSave> save, SpanSave::Phase phase, absl::Status status) {
  Post([this, save, phase, status] {
    if (span_ == nullptr || deleted_) return;
    TellSaveAnswer(save->id(), phase, status);
    if (!status.ok() && span_->save == save) span_->save = nullptr;
  });
}

void Job::TellSaveAnswer(uint64_t save, SpanSave::Phase phase, const absl::Status& status) {
  PeerMessage message;
  PeerMessage::SaveAnswer* answer = message.mutable_save_answer();
  answer->set_save(save);
  answer->set_phase(phase);
  answer->set_code(static_cast<int32_t>(status.code()));
  answer->set_text(std::string(status.message()));
  Tell(span_->coordinator, std::move(message));
}

void Job::OnSave(const PeerMessage& header) {
  const Save& order = header.save();
  if (order.phase() == Save::ARM) {
    EndSpanSave(absl::CancelledError("the coordinator begins another save of the job"));
    span_->save =
        std::make_shared<SpanSave>(order.save(), header.owners_version(), std::set<std::string>());
    return env_.on_save(name(), span_->save, order);
  }
  if (span_->save == nullptr || span_->save->id() != order.save()) {
    if (order.phase() >= Save::FINISH) return;
    return TellSaveAnswer(order.save(), order.phase(),
                          absl::CancelledError("this daemon has given up that save"));
  }
  switch (order.phase()) {
    case Save::COPY:
      if (!due_copy_.has_value() || due_copy_->save != span_->save) {
        return EndSpanSave(absl::CancelledError("its copy was given up"));
      }
      due_copy_->step = header.step();
      return StartDueCopy();
    case Save::CANCEL:
      return EndSpanSave(absl::CancelledError("the coordinator has given up the save"));
    default:
      span_->save->Ordered(order.phase());
      if (order.phase() == Save::FINISH) span_->save = nullptr;
  }
}

void Job::OnSaveAnswer(const std::string& from, const PeerMessage::SaveAnswer& answer) {
  if (span_->save == nullptr || span_->save->id() != answer.save() ||
      !span_->save->others().contains(from)) {
    return;
  }
  span_->save->Answered(from, answer.phase(),
                        absl::Status(static_cast<absl::StatusCode>(answer.code()), answer.text()));
}

void Job::EndSpanSave(const absl::Status& why) {
  if (span_ == nullptr || span_->save == nullptr) return;
  std::exchange(span_->save, nullptr)->End(why);
}

// What a daemon has told or was told in memory of a process is gone with it.
void Job::EndSpanSaveWith(const std::string& daemon, const std::string& why) {
  if (span_ == nullptr || span_->save == nullptr) return;
  const bool takes_part =
      follows() ? daemon == span_->coordinator : span_->save->others().contains(daemon);
  if (takes_part) {
    EndSpanSave(absl::UnavailableError(absl::StrCat("daemon ", daemon, " ", why)));
  }
}

void Job::CheckSpanSave(absl::Time now) {
  if (span_->save == nullptr) return;
  const std::set<std::string> daemons =
      follows() ? std::set<std::string>{span_->coordinator} : span_->save->others();
  for (const std::string& daemon : daemons) {
    const peer::LinkState link = span_->links->State(daemon);
    if (!link.connected && now - link.heard > kSilence) {
      return EndSpanSaveWith(
          daemon,
          absl::StrCat("is out of reach; it was heard of last ",
                       absl::FormatDuration(absl::Trunc(now - link.heard, absl::Seconds(1))),
                       " ago"));
    }
  }
}

// The due copy of a save of all parts: at the coordinator, this is the moment that counts for all.
void Job::StartPart() {
  const DueCopy due = *std::exchange(due_copy_, std::nullopt);
  absl::Status status = due.save->ended();
  if (status.ok() && (due.save->owners_version() != span_->owners_version || span_->resharding)) {
    status = absl::UnavailableError(absl::StrCat(
        "job '", name(), "': its chunks have moved meanwhile; save it again in a moment"));
  }
  if (status.ok() && follows() && due.step != decider_.committed_step()) {
    status = absl::InternalError(absl::StrCat("the copy is of step ", due.step, ", and daemon ",
                                              span_->self, " is at ", decider_.committed_step()));
  }
  if (!status.ok()) return due.done(status);
  if (coordinates()) {
    Save order;
    order.set_phase(Save::COPY);
    TellSave(*due.save, std::move(order));
  }
  SetCopy(std::make_shared<StateCopy>(Snapshot(), due.options, segments_.get(), updater_.gate()));
  env_.failpoints->Reach("checkpoint.copy.begun");
  due.done(copy_);
}

}  // namespace shardd::step
