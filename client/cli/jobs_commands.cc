// shardctl jobs, shards, job delete: the jobs of a daemon.
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

uint64_t HeldBytes(const v1::JobStatus& job) {
  return job.state_bytes() + job.weights_bytes() + job.reduced_bytes() + job.ring_bytes();
}

// What the machine's loss would leave of a job: the step, "-" without a journal.
std::string Durable(const v1::JobStatus& job) {
  if (job.journal_state().empty()) return "-";
  if (job.journal_state() == "whole") return absl::StrCat(job.durable_step());
  return absl::StrCat(job.durable_step(), " ", job.journal_state());
}

class JobsCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "jobs",
        .summary = "the jobs that the daemon holds, with their memory and idle time",
        .help =
            "One line a job: its state, the last committed step, how many ranks are attached,\n"
            "how much memory the daemon holds for it, how much of it lies on disk (a job that\n"
            "nobody uses for job_ttl_seconds is spilled there, and comes back when it is opened),\n"
            "and for how long nobody has used it.\n"
            "The daemon's own user and root see every job, others their own.\n\n"
            "  shardctl jobs --output=json"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>&) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::ListJobs, v1::ListJobsRequest());
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << ToJson(*reply).dump() << "\n";
      return 0;
    }
    Table table(
        {"JOB", "STATE", "STEP", "DURABLE", "RANKS", "STAGE", "HELD", "ON DISK", "IDLE", "UID"});
    for (const v1::JobStatus& job : reply->jobs()) {
      table.AddRow({job.name(), job.state(), absl::StrCat(job.committed_step()), Durable(job),
                    absl::StrCat(job.sessions_size(), "/", job.world_size()),
                    absl::StrCat(job.config().stage()), FormatBytes(HeldBytes(job)),
                    FormatBytes(job.spilled_bytes()),
                    job.idle_seconds() > 0 ? FormatSeconds(job.idle_seconds()) : "-",
                    absl::StrCat(job.uid())});
    }
    context.out << table.Text();
    return 0;
  }
};

class ShardsCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "shards",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "which rank owns which part of a job's state",
        .help =
            "One line a shard: its rank, its range of chunks, how many elements and bytes it\n"
            "holds, the parameters at its ends, and how many optimizer steps its chunks have\n"
            "had (two numbers while an update runs).\n\n"
            "  shardctl shards gpt"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::ListShardsRequest request;
    request.set_job(words[0]);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::ListShards, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << ToJson(*reply).dump() << "\n";
      return 0;
    }
    Table table({"RANK", "CHUNKS", "ELEMENTS", "BYTES", "APPLIED", "FIRST", "LAST", "DAEMON"});
    for (const v1::Shard& shard : reply->shards()) {
      bool one = shard.min_applied() == shard.max_applied();
      table.AddRow({absl::StrCat(shard.rank()),
                    shard.chunks() == 0 ? "-"
                                        : absl::StrCat(shard.first_chunk(), "..",
                                                       shard.first_chunk() + shard.chunks() - 1),
                    absl::StrCat(shard.elements()), FormatBytes(shard.bytes()),
                    one ? absl::StrCat(shard.max_applied())
                        : absl::StrCat(shard.min_applied(), "..", shard.max_applied()),
                    shard.first_parameter(), shard.last_parameter(),
                    shard.daemon().empty() ? "-" : shard.daemon()});
    }
    context.out << table.Text();
    return 0;
  }
};

class JobDeleteCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "job delete",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "delete a job and free its memory",
        .help =
            "Deletes the job with its weights and optimizer state, for good, after asking on a\n"
            "terminal; elsewhere --yes says that it is meant. A job with ranks attached is\n"
            "refused without --force.\n\n"
            "  shardctl job delete gpt --yes"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddBool("force", "also while ranks are attached", &force_);
    flags->AddBool("yes", "do not ask", &yes_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    absl::Status meant = Confirm(context, words[0]);
    if (!meant.ok()) return meant;
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::DeleteJobRequest request;
    request.set_job(words[0]);
    request.set_force(force_);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::DeleteJob, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << Json{{"job", words[0]}, {"freed_bytes", reply->freed_bytes()}}.dump() << "\n";
    } else {
      context.out << "deleted " << words[0] << ", freed " << FormatBytes(reply->freed_bytes())
                  << "\n";
    }
    return 0;
  }

 private:
  absl::Status Confirm(const Context& context, const std::string& job) const {
    if (yes_) return absl::OkStatus();
    if (!context.environment.interactive) {
      return absl::FailedPreconditionError(
          absl::StrCat("deleting job ", job, " cannot be undone: add --yes if you mean it"));
    }
    context.err << "Delete job " << job << " and its state for good? [y/N] " << std::flush;
    std::string answer;
    std::getline(context.in, answer);
    if (answer == "y" || answer == "yes") return absl::OkStatus();
    return absl::CancelledError(absl::StrCat("job ", job, " was not deleted"));
  }

  bool force_ = false;
  bool yes_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeJobsCommand() { return std::make_unique<JobsCommand>(); }
std::unique_ptr<Command> MakeShardsCommand() { return std::make_unique<ShardsCommand>(); }
std::unique_ptr<Command> MakeJobDeleteCommand() { return std::make_unique<JobDeleteCommand>(); }

}  // namespace shardd::cli
