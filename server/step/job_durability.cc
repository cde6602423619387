// The job's journal: what outlives the machine, and how a commit waits for it.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/step/job.h"

namespace shardd::step {

absl::Status Job::CreateJournal(const JournalSetup& setup) {
  if (KeepsPart()) journal_setup_ = setup;
  if (AwaitsOwners()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<Durability>> made = Durability::Create(setup, DurabilityParts());
  if (!made.ok()) return made.status();
  durability_ = *std::move(made);
  return absl::OkStatus();
}

absl::Status Job::ContinueJournal(const JournalSetup& setup, journal::LogEnd end,
                                  journal::Manifest manifest) {
  if (KeepsPart()) journal_setup_ = setup;
  absl::StatusOr<std::unique_ptr<Durability>> made = Durability::Continue(
      setup, DurabilityParts(), std::move(end), std::move(manifest), decider_.committed_step());
  if (!made.ok()) return made.status();
  durability_ = *std::move(made);
  return absl::OkStatus();
}

absl::Status Job::AdoptJournal(const JournalSetup& setup) {
  if (KeepsPart()) journal_setup_ = setup;
  if (AwaitsOwners()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<Durability>> made =
      Durability::Adopt(setup, DurabilityParts(), log_);
  if (!made.ok()) return made.status();
  durability_ = *std::move(made);
  if (!durability_->behind()) return absl::OkStatus();
  // The step was decided and nobody was told: it is pending, as it was.
  const contract::DecisionHeader& header = decider_.current().header;
  const auto records = log_.Records(header.step, header.step);
  if (!records.empty()) commit_.outcome.record = records.back();
  commit_.outcome.clip_factor = std::bit_cast<float>(header.clip_factor_bits);
  commit_.outcome.apply = header.result == v1::STEP_APPLIED;
  commit_.outcome.next_loss_scale = header.loss_scale;
  commit_.phase = CommitPhase::kRecorded;
  return absl::OkStatus();
}

// What is recorded becomes durable; FinishDecision follows when it is.
void Job::MakeDurable() {
  if (durability_ == nullptr) {
    FinishDecision();
    return AfterDecision();
  }
  const uint64_t step = decider_.committed_step();
  durability_->Commit(decider_.current(), commit_.outcome.record, decider_.table(), [this, step] {
    Post([this, step] {
      if (deleted_ || !commit_.pending() || decider_.committed_step() != step) return;
      FinishDecision();
      AfterDecision();
      TryForm();
    });
  });
}

// A new generation: the next group forms when the journal reads nothing of the old one's any more.
void Job::TellJournalOfGeneration() {
  if (durability_ == nullptr) return;
  ++journal_reading_;
  durability_->OnNewGeneration([this, journal = journals_] {
    Post([this, journal] {
      if (journal != journals_) return;
      --journal_reading_;
      FoldWaiting();
      TryForm();
    });
  });
}

void Job::StartJournal() {
  if (durability_ == nullptr) return;
  durability_->Start();
  if (commit_.pending()) {
    MakeDurable();
  } else if (upload_.complete()) {
    durability_->AtBoundary(decider_.committed_step());
  }
}

void Job::FillJournalStatus(v1::JobStatus* status) const {
  std::string machine = "the whole job";
  if (durability_ != nullptr) {
    durability_->Report(status);
    machine = Durability::MachineCost(*status);
  } else if (journal_setup_.has_value()) {
    machine = "the whole job, until its chunks have owners";
  } else if (config_.durability() != v1::process) {
    machine = "the whole job: it has no journal, since journal.directory is not set";
  }
  status->set_crash_cost(
      absl::StrCat("trainer: at most one step computed again; daemon: the same; machine: ", machine,
                   config_.durability() == v1::peer
                       ? absl::StrCat("; machine with its disk: ", Durability::DiskCost(*status))
                       : ""));
}

}  // namespace shardd::step
