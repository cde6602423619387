// shardctl failpoint arm, wait, release: hold a daemon at a named place. For tests.
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

class FailpointArm : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "failpoint arm",
        .arguments = "NAME",
        .min_words = 1,
        .max_words = 1,
        .summary = "make the daemon stop, or die, at a named place (tests)",
        .help =
            "Arms the failpoint NAME of a daemon that runs with --failpoints=true. The thread\n"
            "that passes it next then waits to be released (--action=wait), or the daemon is\n"
            "killed there (--action=kill). --action=off disarms it.\n\n"
            "  shardctl failpoint arm step.decide --skip=10"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddString("action", "ACTION", "wait (default), kill or off", &action_);
    flags->AddUint32("skip", "N", "let it pass this many times first (default 0)", &skip_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::ArmFailpointRequest request;
    request.set_name(words[0]);
    request.set_action(action_);
    request.set_skip(skip_);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::ArmFailpoint, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << Json{{"name", words[0]}, {"action", action_}, {"skip", skip_}}.dump() << "\n";
    }
    return 0;
  }

 private:
  std::string action_ = "wait";
  uint32_t skip_ = 0;
};

class FailpointWait : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "failpoint wait",
        .arguments = "NAME",
        .min_words = 1,
        .max_words = 1,
        .summary = "wait until an armed failpoint holds a thread (tests)",
        .help =
            "Returns when a thread of the daemon is held at the failpoint NAME, and prints how\n"
            "often that has happened; an error when none is within --deadline.\n\n"
            "  shardctl failpoint wait step.decide --deadline=60"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddDouble("deadline", "SECONDS", "how long to wait (default 60)", &deadline_seconds_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::WaitFailpointRequest request;
    request.set_name(words[0]);
    request.set_deadline_seconds(deadline_seconds_);
    // The daemon's own answer, rather than a call that is cut off here.
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::WaitFailpoint, request,
                                  absl::Seconds(deadline_seconds_ + 10));
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << Json{{"name", words[0]}, {"hits", reply->hits()}}.dump() << "\n";
    } else {
      context.out << words[0] << " holds a thread; hits: " << reply->hits() << "\n";
    }
    return 0;
  }

 private:
  double deadline_seconds_ = 60;
};

class FailpointRelease : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "failpoint release",
        .arguments = "NAME",
        .min_words = 1,
        .max_words = 1,
        .summary = "let the thread that a failpoint holds go on (tests)",
        .help =
            "Lets the thread that the failpoint NAME holds go on, and disarms it.\n\n"
            "  shardctl failpoint release step.decide"};
    return *spec;
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::ReleaseFailpointRequest request;
    request.set_name(words[0]);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::ReleaseFailpoint, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      context.out << Json{{"name", words[0]}, {"action", "off"}}.dump() << "\n";
    }
    return 0;
  }
};

}  // namespace

std::unique_ptr<Command> MakeFailpointArmCommand() { return std::make_unique<FailpointArm>(); }
std::unique_ptr<Command> MakeFailpointWaitCommand() { return std::make_unique<FailpointWait>(); }
std::unique_ptr<Command> MakeFailpointReleaseCommand() {
  return std::make_unique<FailpointRelease>();
}

}  // namespace shardd::cli
