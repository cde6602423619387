#include "client/cli/command.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/address.h"

namespace shardd::cli {

namespace {

constexpr int kUsageError = 2;

struct GlobalFlags {
  std::string address;
  std::string output = "table";
  double connect_timeout_seconds = 0;
  bool help = false;

  void AddTo(FlagSet* flags) {
    flags->AddString("address", "PATH",
                     "the daemon's socket (default: SHARDD_ADDRESS, the system's, your own)",
                     &address);
    flags->AddString("output", "FORMAT", "table (default) or json", &output);
    flags->AddDouble("connect-timeout", "SECONDS", "wait this long for a daemon that is starting",
                     &connect_timeout_seconds);
    flags->AddBool("help", "say how this command is used", &help);
  }
};

std::string Overview(const std::vector<std::unique_ptr<Command>>& commands) {
  std::string text =
      "shardctl: trains with shardd and looks after it.\n\n"
      "usage: shardctl COMMAND [flags]\n\n";
  std::vector<std::pair<std::string, std::string>> lines;
  for (const auto& command : commands) {
    const CommandSpec& spec = command->spec();
    lines.emplace_back(
        absl::StrCat("  ", spec.name, spec.arguments.empty() ? "" : " ", spec.arguments),
        spec.summary);
  }
  absl::StrAppend(&text, NamedValues(lines),
                  "\nshardctl COMMAND --help says more. Every command takes --output=json.\n");
  return text;
}

std::string Usage(const CommandSpec& spec, const FlagSet& flags) {
  return absl::StrCat("usage: shardctl ", spec.name, " [flags]", spec.arguments.empty() ? "" : " ",
                      spec.arguments, "\n\n", spec.help, "\n\nflags:\n", flags.Help());
}

std::vector<std::string> Names(const std::vector<std::unique_ptr<Command>>& commands) {
  std::vector<std::string> names;
  for (const auto& command : commands) names.push_back(command->spec().name);
  return names;
}

// The command that the first one or two of `arguments` name, and takes them off.
absl::StatusOr<Command*> FindCommand(const std::vector<std::unique_ptr<Command>>& commands,
                                     std::vector<std::string>* arguments) {
  for (size_t words : {2, 1}) {
    if (arguments->size() < words) continue;
    std::string name =
        absl::StrJoin(arguments->begin(), arguments->begin() + static_cast<ptrdiff_t>(words), " ");
    for (const auto& command : commands) {
      if (command->spec().name != name) continue;
      arguments->erase(arguments->begin(), arguments->begin() + static_cast<ptrdiff_t>(words));
      return command.get();
    }
  }
  std::string given = arguments->front();
  std::string two = arguments->size() > 1 ? absl::StrCat(given, " ", (*arguments)[1]) : given;
  std::string nearest = Nearest(two, Names(commands));
  if (nearest.empty()) nearest = Nearest(given, Names(commands));
  for (const std::string& name : Names(commands)) {
    if (nearest.empty() && name.rfind(given + " ", 0) == 0) nearest = name;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown command '", given, "'",
                   nearest.empty() ? ": shardctl --help lists them"
                                   : absl::StrCat(": did you mean '", nearest, "'?")));
}

int Report(const absl::Status& status, OutputFormat output, std::ostream& err, int code) {
  std::string message(status.message());
  if (output == OutputFormat::kJson) {
    Json error = {
        {"error", {{"code", absl::StatusCodeToString(status.code())}, {"message", message}}}};
    err << error.dump() << "\n";
  } else {
    err << "shardctl: " << message << "\n";
  }
  return code;
}

absl::Status CheckWords(const CommandSpec& spec, const std::vector<std::string>& words) {
  if (words.size() < spec.min_words) {
    return absl::InvalidArgumentError(absl::StrCat("'", spec.name, "' needs ", spec.arguments,
                                                   ": see shardctl ", spec.name, " --help"));
  }
  if (!spec.command_follows && words.size() > spec.max_words) {
    return absl::InvalidArgumentError(absl::StrCat("'", spec.name, "' does not take '",
                                                   words[spec.max_words], "': see shardctl ",
                                                   spec.name, " --help"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminChannel>> Context::Connect() const {
  absl::StatusOr<DaemonAddress> resolved = ResolveAddress(address, environment);
  if (!resolved.ok()) return resolved.status();
  return AdminChannel::Connect(resolved->socket, connect_timeout);
}

int RunCommandLine(const std::vector<std::unique_ptr<Command>>& commands,
                   const Environment& environment, const std::vector<std::string>& given,
                   std::istream& in, std::ostream& out, std::ostream& err) {
  std::vector<std::string> arguments = given;
  if (!arguments.empty() && arguments[0] == "help") {
    arguments.erase(arguments.begin());
    if (!arguments.empty()) arguments.push_back("--help");
  }
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    // Asked for, it is an answer; without a command it is an error.
    bool asked = !given.empty();
    (asked ? out : err) << Overview(commands);
    return asked ? 0 : kUsageError;
  }
  absl::StatusOr<Command*> command = FindCommand(commands, &arguments);
  if (!command.ok()) return Report(command.status(), OutputFormat::kTable, err, kUsageError);
  const CommandSpec& spec = (*command)->spec();

  GlobalFlags global;
  FlagSet flags;
  (*command)->AddFlags(&flags);
  global.AddTo(&flags);
  absl::StatusOr<std::vector<std::string>> words = flags.Parse(arguments, spec.command_follows);
  OutputFormat output = global.output == "json" ? OutputFormat::kJson : OutputFormat::kTable;
  if (!words.ok()) return Report(words.status(), output, err, kUsageError);
  if (global.help) {
    out << Usage(spec, flags);
    return 0;
  }
  if (global.output != "json" && global.output != "table") {
    return Report(absl::InvalidArgumentError(absl::StrCat(
                      "flag --output must be table or json, not '", global.output, "'")),
                  output, err, kUsageError);
  }
  absl::Status fits = CheckWords(spec, *words);
  if (!fits.ok()) return Report(fits, output, err, kUsageError);

  Context context{environment,
                  in,
                  out,
                  err,
                  output,
                  global.address,
                  absl::Seconds(global.connect_timeout_seconds)};
  absl::StatusOr<int> code = (*command)->Run(context, *words);
  return code.ok() ? *code : Report(code.status(), output, err, 1);
}

}  // namespace shardd::cli
