// shardctl job handover: which daemon decides for a job.
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

class JobHandoverCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "job handover",
        .arguments = "JOB",
        .min_words = 1,
        .max_words = 1,
        .summary = "make another daemon the coordinator of a job",
        .help =
            "Of a job that spans daemons one decides: the coordinator, which shardctl status\n"
            "names. It stays so until it is told to hand over, between two steps; trainers go on\n"
            "after a regroup. Ask the coordinator; the other daemon must be reached and take "
            "part.\n"
            "Where shards lie does not change: they follow their ranks.\n\n"
            "  shardctl job handover gpt --to=node-b"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddString("to", "DAEMON", "name of the daemon that is to coordinate", &to_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    if (to_.empty()) {
      return absl::InvalidArgumentError(
          "job handover wants --to=DAEMON; shardctl status JOB names "
          "the daemons that take part");
    }
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    v1::HandOverRequest request;
    request.set_job(words[0]);
    request.set_to(to_);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::HandOver, request);
    if (!reply.ok()) return reply.status();
    if (context.output == OutputFormat::kJson) {
      Json json = ToJson(*reply);
      json["to"] = to_;
      context.out << json.dump() << "\n";
    } else {
      context.out << "daemon " << to_ << " coordinates " << words[0] << " now, instead of "
                  << reply->from() << "\n";
    }
    return 0;
  }

 private:
  std::string to_;
};

}  // namespace

std::unique_ptr<Command> MakeJobHandoverCommand() { return std::make_unique<JobHandoverCommand>(); }

}  // namespace shardd::cli
