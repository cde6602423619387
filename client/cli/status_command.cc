// shardctl status: the daemon, and one job or all of them in detail.
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

using Lines = std::vector<std::pair<std::string, std::string>>;

Lines DaemonLines(const v1::ServerInfoReply& info) {
  return {{"daemon", absl::StrCat("shardd ", info.version(), ", process ", info.pid(), ", up ",
                                  FormatSeconds(static_cast<double>(info.uptime_seconds())))},
          {"threads", absl::StrCat(info.threads(), ", ", info.isa())},
          {"memory", absl::StrCat(FormatBytes(info.planned_bytes()), " planned of ",
                                  FormatBytes(info.budget_bytes()))},
          {"state directory",
           absl::StrCat(info.state_directory(), ", pages of ", FormatBytes(info.page_bytes()))},
          {"sessions", absl::StrCat(info.sessions())},
          {"refused", absl::StrCat(info.refused_descriptors(), " descriptors, ",
                                   info.refused_calls(), " calls")}};
}

std::string LastStep(const v1::StepRecord& last) {
  std::string text =
      absl::StrCat(last.step(), ": loss ", FormatNumber(last.loss(), 6), ", gradient norm ",
                   FormatNumber(last.grad_norm(), 6), ", lr ", FormatNumber(last.lr(), 4));
  if (last.result() == v1::STEP_SKIPPED) absl::StrAppend(&text, ", skipped: ", last.reason());
  return text;
}

Lines JobLines(const v1::JobStatus& job) {
  Lines lines = {
      {"job", absl::StrCat(job.name(), " (", job.job_id(), "), of user ", job.uid())},
      {"state",
       job.failure().empty() ? job.state() : absl::StrCat(job.state(), ": ", job.failure())},
      {"committed step", absl::StrCat(job.committed_step(), " (", job.applied(), " applied, ",
                                      job.skipped_steps(), " skipped)")},
      {"group", absl::StrCat(job.sessions_size(), " of ", job.world_size(), " ranks, ", job.slots(),
                             " slots, generation ", job.generation())},
      {"kind",
       absl::StrCat("stage ", job.config().stage(), ", weights ",
                    v1::WeightsMode_Name(job.config().weights()), ", ",
                    v1::DType_Name(job.config().weight_dtype()), ", ", job.config().optimizer())},
      {"size", absl::StrCat(job.parameters(), " parameters, ", job.elements(), " elements, ",
                            job.chunks(), " chunks, ", job.buckets(), " buckets")},
      {"memory",
       absl::StrCat("state ", FormatBytes(job.state_bytes()), ", weights ",
                    FormatBytes(job.weights_bytes()), ", reduced ",
                    FormatBytes(job.reduced_bytes()), ", rings ", FormatBytes(job.ring_bytes()))},
      {"regroups",
       absl::StrCat(job.regroups(), ", with ", job.recomputed_steps(), " steps computed again")}};
  if (job.last().step() > 0) lines.emplace_back("last step", LastStep(job.last()));
  if (job.idle_seconds() > 0) lines.emplace_back("idle", FormatSeconds(job.idle_seconds()));
  if (!job.crash_cost().empty()) lines.emplace_back("a crash costs", job.crash_cost());
  if (!job.remark().empty()) lines.emplace_back("remark", job.remark());
  return lines;
}

std::string SessionTable(const v1::JobStatus& job) {
  if (job.sessions().empty()) return "";
  Table table({"RANK", "PID", "STATE", "HEARTBEAT"});
  for (const v1::SessionStatus& session : job.sessions()) {
    table.AddRow({absl::StrCat(session.rank()), absl::StrCat(session.pid()), session.state(),
                  FormatSeconds(session.heartbeat_age_seconds())});
  }
  return table.Text();
}

class StatusCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "status",
        .arguments = "[JOB]",
        .max_words = 1,
        .summary = "how the daemon and its jobs are",
        .help =
            "The daemon (version, threads, memory, state directory), then JOB, or every job\n"
            "that you may see: where it is, what it holds, which ranks are attached, its last\n"
            "step, and what the death of a trainer, the daemon or the machine would cost.\n\n"
            "  shardctl status gpt --output=json"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    auto info = (*channel)->Call(&v1::Admin::StubInterface::ServerInfo, v1::ServerInfoRequest());
    if (!info.ok()) return info.status();
    v1::ListJobsRequest request;
    if (!words.empty()) request.set_name(words[0]);
    auto jobs = (*channel)->Call(&v1::Admin::StubInterface::ListJobs, request);
    if (!jobs.ok()) return jobs.status();
    if (!words.empty() && jobs->jobs().empty()) {
      return absl::NotFoundError(
          absl::StrCat("no job ", words[0], " that you may see: shardctl jobs lists them"));
    }
    if (context.output == OutputFormat::kJson) {
      Json json = {{"daemon", ToJson(*info)}, {"jobs", ToJson(*jobs)["jobs"]}};
      context.out << json.dump() << "\n";
      return 0;
    }
    context.out << NamedValues(DaemonLines(*info));
    for (const v1::JobStatus& job : jobs->jobs()) {
      context.out << "\n" << NamedValues(JobLines(job)) << SessionTable(job);
    }
    return 0;
  }
};

}  // namespace

std::unique_ptr<Command> MakeStatusCommand() { return std::make_unique<StatusCommand>(); }

}  // namespace shardd::cli
