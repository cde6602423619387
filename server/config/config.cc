#include "server/config/config.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/contract/config_json.h"
#include "server/config/peer_config.h"

namespace shardd::config {

namespace {

const google::protobuf::Descriptor* Schema() { return v1::DaemonConfig::descriptor(); }

std::string EnvironmentName(const std::string& path) {
  std::string name = "SHARDD_";
  for (char c : path) name += c == '.' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

absl::Status ReadFile(const std::string& path, v1::DaemonConfig* config) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("cannot read the configuration file ", path));
  }
  std::stringstream text;
  text << file.rdbuf();
  return contract::ParseJson(text.str(), path, config);
}

struct Flag {
  std::string name;
  std::string value;
};

// Splits "--name=value" and "--name value"; a flag of its own kind has no value.
absl::StatusOr<std::vector<Flag>> SplitFlags(const std::vector<std::string>& arguments) {
  std::vector<Flag> flags;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!absl::StartsWith(argument, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", argument, "'; see shardd --help"));
    }
    const size_t equals = argument.find('=');
    Flag flag{argument.substr(2, equals == std::string::npos ? equals : equals - 2), ""};
    if (equals != std::string::npos) {
      flag.value = argument.substr(equals + 1);
    } else if (flag.name != "help" && flag.name != "version" && flag.name != "check-config") {
      if (i + 1 == arguments.size()) {
        return absl::InvalidArgumentError(absl::StrCat("flag --", flag.name, " wants a value"));
      }
      flag.value = arguments[++i];
    }
    flags.push_back(std::move(flag));
  }
  return flags;
}

absl::Status Range(const char* path, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, " is ", value, "; it must be from ", low, " to ", high));
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(
    const std::vector<std::string>& arguments,
    const std::function<std::optional<std::string>(const std::string&)>& getenv) {
  absl::StatusOr<std::vector<Flag>> flags = SplitFlags(arguments);
  if (!flags.ok()) return flags.status();
  CommandLine line;
  std::string file;
  for (const Flag& flag : *flags) {
    if (flag.name == "config") file = flag.value;
    line.help |= flag.name == "help";
    line.version |= flag.name == "version";
    line.check_config |= flag.name == "check-config";
  }
  if (line.help || line.version) return line;
  if (!file.empty()) {
    if (absl::Status status = ReadFile(file, &line.config); !status.ok()) return status;
  }
  for (const std::string& path : contract::FieldPaths(Schema())) {
    const std::string name = EnvironmentName(path);
    if (std::optional<std::string> value = getenv(name)) {
      absl::Status status = contract::SetField(&line.config, path, *value);
      if (!status.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("environment ", name, ": ", status.message()));
      }
    }
  }
  for (const Flag& flag : *flags) {
    if (flag.name == "config" || flag.name == "check-config") continue;
    absl::Status status = contract::SetField(&line.config, flag.name, flag.value);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("flag --", flag.name, ": ", status.message()));
    }
  }
  FillDefaults(geteuid(), getenv("XDG_RUNTIME_DIR").value_or(""), &line.config);
  if (absl::Status status = Validate(line.config); !status.ok()) return status;
  return line;
}

void FillDefaults(uint32_t uid, const std::string& runtime_dir, v1::DaemonConfig* c) {
  auto* listen = c->mutable_listen();
  if (listen->socket().empty()) {
    listen->set_socket(uid == 0               ? "/run/shardd/shardd.sock"
                       : !runtime_dir.empty() ? runtime_dir + "/shardd/shardd.sock"
                                              : absl::StrCat("/tmp/shardd-", uid, "/shardd.sock"));
  }
  if (listen->socket_mode().empty()) listen->set_socket_mode("0660");
  if (c->memory().ring_bytes_max() == 0) {
    c->mutable_memory()->set_ring_bytes_max(uint64_t{64} << 30);
  }
  if (c->store().directory().empty()) {
    const std::string mounted = "/run/shardd/state";
    c->mutable_store()->set_directory(
        access(mounted.c_str(), W_OK) == 0 ? mounted : absl::StrCat("/dev/shm/shardd-", uid));
  }
  if (c->journal().snapshots_kept() == 0) c->mutable_journal()->set_snapshots_kept(1);
  if (c->journal().snapshot_bytes_per_second() == 0) {
    c->mutable_journal()->set_snapshot_bytes_per_second(200'000'000);
  }
  if (c->journal().on_failure().empty()) c->mutable_journal()->set_on_failure("stop");
  if (c->journal().mirror().empty() && c->peer().peers_size() > 0) {
    c->mutable_journal()->set_mirror(c->peer().peers(0).name());
  }
  if (c->journal().mirror_seconds() == 0) c->mutable_journal()->set_mirror_seconds(10);
  if (c->journal().mirror_fetch_seconds() == 0) c->mutable_journal()->set_mirror_fetch_seconds(10);
  if (c->job_ttl_seconds() == 0) c->set_job_ttl_seconds(24 * 3600);
  if (c->spill().directory().empty()) {
    c->mutable_spill()->set_directory(uid == 0 ? "/var/lib/shardd/spill"
                                               : absl::StrCat("/var/tmp/shardd-", uid, "/spill"));
  }
  if (c->step().isa().empty()) c->mutable_step()->set_isa("auto");
  if (c->step().spin_microseconds() == 0) c->mutable_step()->set_spin_microseconds(20);
  if (c->limits().sessions() == 0) c->mutable_limits()->set_sessions(4096);
  if (c->limits().jobs() == 0) c->mutable_limits()->set_jobs(256);
}

namespace {

absl::Status ValidateJournal(const v1::DaemonConfig& c) {
  const v1::DaemonConfig::Journal& journal = c.journal();
  if (!journal.directory().empty() && !absl::StartsWith(journal.directory(), "/")) {
    return absl::InvalidArgumentError(absl::StrCat("journal.directory is '", journal.directory(),
                                                   "'; it must be an absolute path"));
  }
  if (!journal.directory().empty() && journal.directory() == c.store().directory()) {
    return absl::InvalidArgumentError(
        absl::StrCat("journal.directory is '", journal.directory(),
                     "', as store.directory is; give a directory on a disk"));
  }
  if (journal.on_failure() != "stop" && journal.on_failure() != "degrade") {
    return absl::InvalidArgumentError(absl::StrCat("journal.on_failure is '", journal.on_failure(),
                                                   "'; it must be stop or degrade"));
  }
  if (!c.file_faults().empty() && !c.failpoints()) {
    return absl::InvalidArgumentError(
        "file_faults makes the daemon's files fail and is for tests; it needs failpoints = true");
  }
  const auto& peers = c.peer().peers();
  if (!journal.mirror().empty() && std::none_of(peers.begin(), peers.end(), [&](const auto& peer) {
        return peer.name() == journal.mirror();
      })) {
    return absl::InvalidArgumentError(absl::StrCat(
        "journal.mirror is '", journal.mirror(), "', which is not the name of any of peer.peers"));
  }
  // A segment holds its header and at least a record or two.
  constexpr double kMiB = 1 << 20;
  absl::Status status = Range("journal.snapshots_kept", journal.snapshots_kept(), 1, 16);
  status.Update(Range("journal.mirror_seconds", journal.mirror_seconds(), 0.1, 3600));
  status.Update(Range("journal.mirror_fetch_seconds", journal.mirror_fetch_seconds(), 0.1, 3600));
  if (journal.segment_bytes() != 0) {
    status.Update(Range("journal.segment_bytes", static_cast<double>(journal.segment_bytes()),
                        kMiB / 4, kMiB * kMiB));
  }
  return status;
}

}  // namespace

absl::Status Validate(const v1::DaemonConfig& c) {
  const std::string& mode = c.listen().socket_mode();
  if (mode.size() < 3 || mode.size() > 4 ||
      !std::all_of(mode.begin(), mode.end(), [](char d) { return d >= '0' && d <= '7'; })) {
    return absl::InvalidArgumentError(absl::StrCat("listen.socket_mode is '", mode,
                                                   "'; it must be an octal mode such as \"0660\""));
  }
  if (!absl::StartsWith(c.listen().socket(), "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen.socket is '", c.listen().socket(), "'; it must be an absolute path"));
  }
  if (c.listen().socket().size() + 7 >= 108) {
    return absl::InvalidArgumentError(absl::StrCat("listen.socket '", c.listen().socket(), "' has ",
                                                   c.listen().socket().size(),
                                                   " bytes; a socket's path has at most 100"));
  }
  if (!absl::StartsWith(c.store().directory(), "/")) {
    return absl::InvalidArgumentError(absl::StrCat("store.directory is '", c.store().directory(),
                                                   "'; it must be an absolute path"));
  }
  if (!absl::StartsWith(c.spill().directory(), "/")) {
    return absl::InvalidArgumentError(absl::StrCat("spill.directory is '", c.spill().directory(),
                                                   "'; it must be an absolute path"));
  }
  if (c.job_ttl_seconds() != -1 && !(c.job_ttl_seconds() > 0 && c.job_ttl_seconds() <= 1e9)) {
    return absl::InvalidArgumentError(
        absl::StrCat("job_ttl_seconds is ", c.job_ttl_seconds(),
                     "; it must be above 0 and at most 1e9, or -1 for never"));
  }
  const std::string& checkpoints = c.checkpoint().directory();
  if (!checkpoints.empty() && !absl::StartsWith(checkpoints, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint.directory is '", checkpoints, "'; it must be an absolute path"));
  }
  const std::string& isa = c.step().isa();
  if (isa != "auto" && isa != "scalar" && isa != "avx2" && isa != "avx512") {
    return absl::InvalidArgumentError(
        absl::StrCat("step.isa is '", isa, "'; it must be auto, scalar, avx2 or avx512"));
  }
  if (absl::Status status = ValidateJournal(c); !status.ok()) return status;
  absl::Status status = Range("step.threads", c.step().threads(), 0, 1024);
  status.Update(Range("step.spin_microseconds", c.step().spin_microseconds(), 0, 1e6));
  status.Update(Range("limits.sessions", c.limits().sessions(), 1, 65536));
  status.Update(Range("limits.jobs", c.limits().jobs(), 1, 65536));
  status.Update(Range("exit_when_idle_seconds", c.exit_when_idle_seconds(), 0, 1e9));
  const v1::DaemonConfig::Peer& peer = c.peer();
  if (!peer.name().empty() || !peer.listen().empty() || peer.peers_size() > 0) {
    status.Update(CheckPeerConfig(peer));
  }
  return status;
}

std::string HelpText() {
  std::string text =
      "shardd: owns the optimizer state of training jobs on this node.\n\n"
      "usage: shardd [--config=FILE] [--PATH=VALUE ...]\n\n"
      "  --config=FILE    JSON configuration; keys are the paths below, nested\n"
      "  --check-config   check configuration and flags, print them complete, and end\n"
      "  --version        print the version\n"
      "  --help           this text\n\n"
      "Every key of the configuration is also a flag and an environment variable\n"
      "(SHARDD_MEMORY_BUDGET_BYTES); flag > environment > file. Keys and defaults:\n\n";
  v1::DaemonConfig defaults;
  FillDefaults(geteuid(), "", &defaults);
  for (const std::string& path : contract::FieldPaths(Schema())) {
    absl::StatusOr<std::string> value = contract::GetField(defaults, path);
    absl::StrAppend(&text, "  --", path, "=", value.ok() ? *value : "", "\n");
  }
  absl::StrAppend(
      &text,
      "\nStart one per node, for example:\n"
      "  shardd --listen.socket=/tmp/me/shardd.sock --memory.budget_bytes=8000000000\n"
      "then give trainers SHARDD_ADDRESS=/tmp/me/shardd.sock, and look with shardctl status.\n");
  return text;
}

}  // namespace shardd::config
