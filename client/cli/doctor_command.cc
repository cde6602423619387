// shardctl doctor: is this machine fit, and if not, what to do.
#include "client/cli/commands.h"
#include "client/cli/doctor_facts.h"
#include "proto/contract/version.h"

namespace shardd::cli {

namespace {

std::string Name(Severity severity) {
  switch (severity) {
    case Severity::kOk:
      return "ok";
    case Severity::kWarning:
      return "warning";
    case Severity::kProblem:
      return "problem";
  }
  return "";
}

class DoctorCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "doctor",
        .summary = "check this machine, with a remedy for each finding",
        .help =
            "Looks at the kernel, the memlock limit, the state directory (huge pages, size),\n"
            "the CPUs, logind's RemoveIPC, and the versions of shardctl and the daemon.\n"
            "A warning costs speed or safety; a problem means that something will not work,\n"
            "and the exit code is then 1. It changes nothing.\n\n"
            "  shardctl doctor --output=json"};
    return *spec;
  }

  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>&) override {
    std::vector<Finding> findings = Diagnose(Gather(context));
    bool problem = false;
    Json list = Json::array();
    std::string text;
    for (const Finding& finding : findings) {
      problem = problem || finding.severity == Severity::kProblem;
      list.push_back({{"check", finding.check},
                      {"severity", Name(finding.severity)},
                      {"detail", finding.detail},
                      {"remedy", finding.remedy}});
      text += Name(finding.severity) + std::string(9 - Name(finding.severity).size(), ' ') +
              finding.check + ": " + finding.detail + "\n";
      if (!finding.remedy.empty()) text += "         remedy: " + finding.remedy + "\n";
    }
    context.out << (context.output == OutputFormat::kJson ? Json{{"findings", list}}.dump() + "\n"
                                                          : text);
    return problem ? 1 : 0;
  }

 private:
  static SystemFacts Gather(const Context& context) {
    absl::StatusOr<v1::ServerInfoReply> info = Ask(context);
    SystemFacts facts =
        GatherFacts(context.environment.uid, info.ok() ? info->state_directory() : "");
    facts.version = contract::kVersion;
    if (info.ok()) {
      facts.daemon_version = info->version();
    } else {
      facts.daemon_error = std::string(info.status().message());
    }
    return facts;
  }

  static absl::StatusOr<v1::ServerInfoReply> Ask(const Context& context) {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    return (*channel)->Call(&v1::Admin::StubInterface::ServerInfo, v1::ServerInfoRequest());
  }
};

}  // namespace

std::unique_ptr<Command> MakeDoctorCommand() { return std::make_unique<DoctorCommand>(); }

}  // namespace shardd::cli
