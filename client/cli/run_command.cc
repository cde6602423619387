// shardctl run: a daemon if there is none, and the ranks of a job.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/address.h"
#include "client/cli/commands.h"
#include "client/cli/launcher.h"
#include "client/cli/rank_process.h"
#include "client/daemon_starter.h"
#include "proto/contract/slot_tree.h"

namespace shardd::cli {

namespace {

// A daemon that is left behind, with jobs or because we were killed, ends itself
// when nobody has used it for a day.
constexpr char kIdleLimit[] = "--exit_when_idle_seconds=86400";
constexpr absl::Duration kDaemonEnd = absl::Seconds(60);

class RunCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "run",
        .arguments = "-- COMMAND...",
        .min_words = 1,
        .summary = "run the ranks of a job on this node",
        .help =
            "Starts COMMAND --ranks times, with RANK, LOCAL_RANK, WORLD_SIZE and SHARDD_ADDRESS\n"
            "in its environment, and prints what the ranks write, each line after its [rank].\n"
            "A rank that dies is started again up to --max-restarts times: the job goes on at\n"
            "the step after the last committed one. When one fails for good the others are\n"
            "ended, and its exit code is this command's.\n"
            "Ctrl-C and SIGTERM go to all ranks; a second one kills them.\n\n"
            "Without --address and SHARDD_ADDRESS, and where no daemon of the system or of your\n"
            "own runs, one is started for this command. It is ended after it unless it holds\n"
            "jobs: then the same command again goes on with them, and 'shardctl job delete'\n"
            "gives their memory back. If it dies, it is started again and takes up the jobs where\n"
            "they were; the ranks go on with it by themselves. What ends again soon after it was\n"
            "started, a rank or the daemon, is started again after a pause, up to 10 seconds.\n\n"
            "  shardctl run --ranks 2 --max-restarts 3 -- shardd-train --data texts --stage 2",
        .command_follows = true};
    return *spec;
  }

  void AddFlags(FlagSet* flags) override {
    flags->AddUint32("ranks", "N", "how many to start (default 1)", &ranks_);
    flags->AddUint32("max-restarts", "K", "how often each may be started again (default 0)",
                     &max_restarts_);
    flags->AddDouble("grace", "SECONDS",
                     "what the others get to end when one has failed (default 10)",
                     &grace_seconds_);
    flags->AddBool("keep-daemon", "never end a daemon that this command started", &keep_);
  }

  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    // Before a daemon is started for them. A job has at most as many ranks as slots.
    if (ranks_ == 0 || ranks_ > contract::kMaxSlots) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks must be from 1 to ", contract::kMaxSlots, ", not ", ranks_));
    }
    absl::StatusOr<DaemonInDirectory> daemon = FindDaemon(context);
    if (!daemon.ok()) return daemon.status();
    const pid_t pid = daemon->attach->daemon_pid();
    // It was only to see that the daemon answers: no session of ours.
    daemon->attach.reset();
    LaunchOptions options = MakeOptions(context, words, daemon->socket_path);
    if (daemon->started_pid != 0) SayStarted(context, *daemon);
    contract::UniqueFd pidfd;
    // This user's own daemon has no other supervisor.
    if (daemon->socket_path.starts_with(PrivateDirectory(context.environment) + "/")) {
      pidfd = PidFd(pid);
      options.daemon_pidfd = pidfd.get();
      options.restart_daemon = [&] { return RestartDaemon(context, &*daemon); };
    }
    absl::StatusOr<LaunchResult> result = Launch(options);
    if (!keep_ && daemon->started_pid != 0 && !HoldsJobs(context, *daemon)) {
      absl::Status ended = EndDaemon(PidFd(daemon->started_pid), daemon->started_pid, kDaemonEnd);
      if (!ended.ok()) Note(context, std::string(ended.message()));
    }
    if (!result.ok()) return result.status();
    if (context.output == OutputFormat::kJson) PrintResult(context, *result);
    return result->exit_code;
  }

 private:
  absl::StatusOr<DaemonInDirectory> FindDaemon(const Context& context) {
    const Environment& environment = context.environment;
    absl::StatusOr<DaemonAddress> address = ResolveAddress(context.address, environment);
    if (!address.ok()) return address.status();
    absl::StatusOr<std::unique_ptr<AttachConnection>> attach =
        AttachConnection::Connect(address->socket, absl::Now() + context.connect_timeout);
    if (attach.ok()) return DaemonInDirectory{address->socket, *std::move(attach), 0};
    if (address->explicit_choice || !absl::IsUnavailable(attach.status())) return attach.status();
    return StartDaemon(environment);
  }

  absl::StatusOr<DaemonInDirectory> StartDaemon(const Environment& environment) const {
    absl::StatusOr<std::string> binary = DaemonBinary(environment);
    if (!binary.ok()) return binary.status();
    DaemonStart start;
    start.directory = PrivateDirectory(environment);
    start.binary = *binary;
    if (!keep_) start.flags.push_back(kIdleLimit);
    absl::Status made = MakePrivateDirectory(start.directory);
    if (!made.ok()) return made;
    return AttachOrStartDaemon(start);
  }

  static void SayStarted(const Context& context, const DaemonInDirectory& daemon) {
    Note(context, absl::StrCat("started a daemon, process ", daemon.started_pid, ", at ",
                               daemon.socket_path));
  }

  static contract::UniqueFd PidFd(pid_t pid) {
    return contract::UniqueFd(pid > 0 ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1);
  }

  // Starts a daemon in place of the user's own, which has ended: it takes up the jobs' state.
  absl::StatusOr<contract::UniqueFd> RestartDaemon(const Context& context,
                                                   DaemonInDirectory* daemon) {
    if (daemon->started_pid != 0) waitpid(daemon->started_pid, nullptr, WNOHANG);
    daemon->started_pid = 0;
    absl::StatusOr<DaemonInDirectory> now = StartDaemon(context.environment);
    if (!now.ok()) return now.status();
    daemon->started_pid = now->started_pid;
    if (daemon->started_pid != 0) SayStarted(context, *daemon);
    return PidFd(now->attach->daemon_pid());
  }

  // Whether ending the daemon would cut off somebody's state; says so for each job.
  static bool HoldsJobs(const Context& context, const DaemonInDirectory& daemon) {
    auto channel = AdminChannel::Connect(daemon.socket_path, absl::ZeroDuration());
    if (!channel.ok()) return false;
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::ListJobs, v1::ListJobsRequest());
    if (!reply.ok()) return false;
    for (const v1::JobStatus& job : reply->jobs()) {
      Note(context,
           absl::StrCat("job ", job.name(), " stays with the daemon at step ", job.committed_step(),
                        ": the same command goes on with it, "
                        "'shardctl job delete ",
                        job.name(), "' frees its memory"));
    }
    return reply->jobs_size() > 0;
  }

  // SHARDD_DAEMON_BINARY, the one beside shardctl, the one in PATH.
  static absl::StatusOr<std::string> DaemonBinary(const Environment& environment) {
    std::string named = environment.Get("SHARDD_DAEMON_BINARY");
    if (!named.empty()) return FindProgram(named, {});
    std::string beside = absl::StrCat(environment.executable_directory, "/shardd");
    if (access(beside.c_str(), X_OK) == 0) return beside;
    absl::StatusOr<std::string> found =
        FindProgram("shardd", {absl::StrCat("PATH=", environment.Get("PATH"))});
    if (found.ok()) return found;
    return absl::NotFoundError(
        absl::StrCat("no daemon runs, and there is none to start: ", found.status().message(),
                     ": start shardd, or name its binary with SHARDD_DAEMON_BINARY"));
  }

  LaunchOptions MakeOptions(const Context& context, const std::vector<std::string>& words,
                            const std::string& socket) const {
    LaunchOptions options;
    options.ranks = ranks_;
    options.max_restarts = max_restarts_;
    options.command = words;
    for (const auto& [name, value] : context.environment.variables) {
      options.environment.push_back(absl::StrCat(name, "=", value));
    }
    options.address = absl::StrCat("unix:", socket);
    options.grace = absl::Seconds(grace_seconds_);
    options.on_note = [&context](const std::string& text) { Note(context, text); };
    options.on_line = [&context](uint32_t rank, Stream stream, std::string_view line) {
      PrintLine(context, rank, stream, line);
    };
    return options;
  }

  static void Note(const Context& context, const std::string& text) {
    if (context.output == OutputFormat::kJson) {
      context.err << Json{{"note", text}}.dump() << std::endl;
    } else {
      context.err << "shardctl: " << text << std::endl;
    }
  }

  static void PrintLine(const Context& context, uint32_t rank, Stream stream,
                        std::string_view line) {
    if (context.output == OutputFormat::kJson) {
      Json json = {{"rank", rank},
                   {"stream", stream == Stream::kOut ? "stdout" : "stderr"},
                   {"line", std::string(line)}};
      // A rank may write bytes that are no UTF-8.
      context.out << json.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
    } else {
      (stream == Stream::kOut ? context.out : context.err)
          << "[" << rank << "] " << line << std::endl;
    }
  }

  static void PrintResult(const Context& context, const LaunchResult& result) {
    Json ranks = Json::array();
    for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
      ranks.push_back({{"rank", rank},
                       {"restarts", result.ranks[rank].restarts},
                       {"exit_code", result.ranks[rank].exit_code}});
    }
    context.out << Json{{"exit_code", result.exit_code}, {"ranks", ranks}}.dump() << std::endl;
  }

  uint32_t ranks_ = 1;
  uint32_t max_restarts_ = 0;
  double grace_seconds_ = 10;
  bool keep_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeRunCommand() { return std::make_unique<RunCommand>(); }

}  // namespace shardd::cli
