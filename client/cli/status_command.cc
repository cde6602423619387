// shardctl status: the daemon, and one job or all of them in detail.
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

using Lines = std::vector<std::pair<std::string, std::string>>;

// What it found of the daemon before it.
std::string TakenUp(const v1::ServerInfoReply& info) {
  if (info.adopted_jobs() == 0) return "nothing";
  std::string text = absl::StrCat(info.adopted_jobs(), info.adopted_jobs() == 1 ? " job" : " jobs",
                                  " in ", FormatSeconds(info.adopt_seconds()));
  if (info.down_seconds() > 0) {
    absl::StrAppend(&text, ", ", FormatSeconds(info.down_seconds()),
                    " after the daemon before was drained");
  }
  return text;
}

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
                                   info.refused_calls(), " calls")},
          {"taken up", TakenUp(info)}};
}

// Of a daemon that knows others.
void AddPeers(const v1::ServerInfoReply& info, Lines* lines) {
  if (info.peer_name().empty()) return;
  lines->emplace_back("among peers",
                      absl::StrCat(info.peer_name(), ", at port ", info.peer_port()));
  for (const v1::PeerStatus& peer : info.peers()) {
    lines->emplace_back(
        absl::StrCat("peer ", peer.name()),
        peer.connected()
            ? absl::StrCat("reached, ", FormatBytes(peer.queued_bytes()), " on the way")
            : absl::StrCat("not reached, ",
                           peer.silent_seconds() < 0
                               ? "never heard of"
                               : absl::StrCat("silent for ", FormatSeconds(peer.silent_seconds())),
                           peer.error().empty() ? "" : ": ", peer.error()));
  }
  lines->emplace_back(
      "refused of peers",
      absl::StrCat(info.refused_peer_connections(), " connections, ", info.refused_peers(),
                   " names or versions, ", info.refused_peer_messages(), " messages; ",
                   info.fenced_peer_messages(), " fenced"));
}

// Of a job that daemons may share.
void AddShares(const v1::JobStatus& job, Lines* lines) {
  if (job.peers().empty()) return;
  lines->emplace_back("daemons", absl::StrCat(job.daemon(), " (asked) holds ", job.own_chunks(),
                                              " chunks; ", job.coordinator(), " coordinates"));
  for (const v1::JobPeer& peer : job.peers()) {
    lines->emplace_back(
        absl::StrCat("daemon ", peer.daemon()),
        absl::StrCat(
            peer.chunks(), " chunks, ", peer.sessions(), " ranks, ",
            peer.answered() ? absl::StrCat(peer.state(), " at step ", peer.committed_step(),
                                           ", holds ", FormatBytes(peer.held_bytes()))
            : peer.silent_seconds() < 0 ? "gave no answer, and was never heard of"
                                        : absl::StrCat("gave no answer; silent for ",
                                                       FormatSeconds(peer.silent_seconds()))));
  }
  if (!job.waits_for().empty()) lines->emplace_back("waits for", job.waits_for());
}

std::string LastStep(const v1::StepRecord& last) {
  std::string text =
      absl::StrCat(last.step(), ": loss ", FormatNumber(last.loss(), 6), ", gradient norm ",
                   FormatNumber(last.grad_norm(), 6), ", lr ", FormatNumber(last.lr(), 4));
  if (last.result() == v1::STEP_SKIPPED) absl::StrAppend(&text, ", skipped: ", last.reason());
  return text;
}

// Of a job with one group the last step says all.
void AddGroups(const v1::JobStatus& job, Lines* lines) {
  if (job.groups_size() < 2) return;
  for (int g = 0; g < job.groups_size(); ++g) {
    const v1::GroupStatus& group = job.groups(g);
    lines->emplace_back(
        absl::StrCat("group ", g),
        absl::StrCat(group.name(), ": lr ", FormatNumber(group.lr(), 4), ", weight decay ",
                     FormatNumber(group.weight_decay(), 4), ", ", group.parameters(),
                     " parameters, ", group.elements(), " elements"));
  }
}

std::string Journal(const v1::JobStatus& job) {
  std::string text = absl::StrCat(job.journal_state(), ", durable up to step ", job.durable_step(),
                                  ", last snapshot of step ", job.journal_snapshot_step(), ", log ",
                                  FormatBytes(job.journal_log_bytes()), ", ",
                                  FormatBytes(job.journal_bytes()), " on disk");
  if (!job.journal_failure().empty()) absl::StrAppend(&text, ": ", job.journal_failure());
  return text;
}

std::string MirrorOf(const v1::JobStatus& job) {
  return absl::StrCat("at peer ", job.mirror_peer(), ", up to step ", job.mirror_step(), "; ",
                      job.mirror_state());
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
                    v1::DType_Name(job.config().weight_dtype()), ", ", job.config().optimizer(),
                    job.config().moments() == v1::MomentFormat::bf16 ? ", moments bf16" : "",
                    job.config().stochastic_moments() ? " rounded stochastically" : "",
                    job.config().split_master() ? ", split master" : "",
                    job.config().stochastic_weights() ? ", weights rounded stochastically" : "")},
      {"size", absl::StrCat(job.parameters(), " parameters, ", job.elements(), " elements, ",
                            job.chunks(), " chunks, ", job.buckets(), " buckets")},
      {"memory",
       absl::StrCat("state ", FormatBytes(job.state_bytes()), ", weights ",
                    FormatBytes(job.weights_bytes()), ", reduced ",
                    FormatBytes(job.reduced_bytes()), ", rings ", FormatBytes(job.ring_bytes()))},
      {"regroups",
       absl::StrCat(job.regroups(), ", with ", job.recomputed_steps(), " steps computed again")}};
  if (job.last().step() > 0) lines.emplace_back("last step", LastStep(job.last()));
  AddGroups(job, &lines);
  if (job.idle_seconds() > 0) lines.emplace_back("idle", FormatSeconds(job.idle_seconds()));
  if (!job.journal_state().empty()) lines.emplace_back("journal", Journal(job));
  if (!job.checkpoint_state().empty()) {
    lines.emplace_back("checkpoint", job.checkpoint_state());
  } else if (!job.checkpoint_failure().empty()) {
    lines.emplace_back("checkpoint", absl::StrCat("failed: ", job.checkpoint_failure()));
  }
  if (!job.checkpoint_path().empty()) {
    lines.emplace_back("last saved",
                       absl::StrCat("step ", job.checkpoint_step(), ": ", job.checkpoint_path()));
  }
  if (job.checkpoint_stall_seconds() > 0 || job.checkpoint_copy_seconds() > 0) {
    lines.emplace_back(
        "saves cost",
        absl::StrCat("updates waited ", FormatSeconds(job.checkpoint_stall_seconds()),
                     " and copied for ", FormatSeconds(job.checkpoint_copy_seconds())));
  }
  if (!job.mirror_peer().empty()) lines.emplace_back("mirror", MirrorOf(job));
  AddShares(job, &lines);
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
    Lines daemon = DaemonLines(*info);
    AddPeers(*info, &daemon);
    context.out << NamedValues(daemon);
    for (const v1::JobStatus& job : jobs->jobs()) {
      context.out << "\n" << NamedValues(JobLines(job)) << SessionTable(job);
    }
    return 0;
  }
};

}  // namespace

std::unique_ptr<Command> MakeStatusCommand() { return std::make_unique<StatusCommand>(); }

}  // namespace shardd::cli
