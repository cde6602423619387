// shardctl version: of this program, and of the daemon if one answers.
#include "client/cli/commands.h"
#include "proto/contract/segments.h"
#include "proto/contract/version.h"

namespace shardd::cli {

namespace {

class VersionCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "version",
        .summary = "the version of this program and of the daemon",
        .help =
            "Prints the version and protocol version of shardctl, and those of the daemon if\n"
            "one answers. A daemon that does not is no error here.\n\n"
            "  shardctl version --output=json"};
    return *spec;
  }

  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>&) override {
    Json json = {{"version", contract::kVersion}, {"protocol_version", contract::kProtocolVersion}};
    std::vector<std::pair<std::string, std::string>> lines = {
        {"shardctl", std::string(contract::kVersion) + ", protocol " +
                         std::to_string(contract::kProtocolVersion)}};
    absl::StatusOr<v1::ServerInfoReply> info = Ask(context);
    if (info.ok()) {
      json["daemon"] = {{"version", info->version()},
                        {"protocol_version", info->protocol_version()}};
      lines.emplace_back(
          "shardd", info->version() + ", protocol " + std::to_string(info->protocol_version()));
    } else {
      json["daemon"] = nullptr;
      lines.emplace_back("shardd", std::string(info.status().message()));
    }
    context.out << (context.output == OutputFormat::kJson ? json.dump() + "\n"
                                                          : NamedValues(lines));
    return 0;
  }

 private:
  static absl::StatusOr<v1::ServerInfoReply> Ask(const Context& context) {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    return (*channel)->Call(&v1::Admin::StubInterface::ServerInfo, v1::ServerInfoRequest());
  }
};

}  // namespace

std::unique_ptr<Command> MakeVersionCommand() { return std::make_unique<VersionCommand>(); }

}  // namespace shardd::cli
