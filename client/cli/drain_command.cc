// shardctl drain: ends the daemon between two steps of every job.
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"

namespace shardd::cli {

namespace {

constexpr absl::Duration kEndTimeout = absl::Seconds(60);

class DrainCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "drain",
        .summary = "end the daemon between two steps, for an upgrade",
        .help =
            "Lets every job finish the step that it is taking, then ends the daemon. All state\n"
            "stays in the state directory; trainers wait (SHARDD_RECONNECT_SECONDS) and go on by\n"
            "themselves when a daemon is started again on the same directory and socket. Prints\n"
            "where each job stands and how long it took. A job that does not come to the end of\n"
            "its step within --deadline stands still where it is; its step is computed again.\n\n"
            "  shardctl drain && systemctl start shardd"};
    return *spec;
  }
  void AddFlags(FlagSet* flags) override {
    flags->AddDouble("deadline", "SECONDS", "how long a job may take to end its step (30)",
                     &deadline_seconds_);
  }
  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>&) override {
    auto channel = context.Connect();
    if (!channel.ok()) return channel.status();
    const absl::Time begun = absl::Now();
    v1::DrainRequest request;
    request.set_deadline_seconds(deadline_seconds_);
    auto reply = (*channel)->Call(&v1::Admin::StubInterface::Drain, request,
                                  absl::Seconds(deadline_seconds_ + 30));
    if (!reply.ok()) return reply.status();
    if (!(*channel)->AwaitEnd(kEndTimeout)) {
      return absl::DeadlineExceededError(
          "the daemon is drained, but its process was not seen to end; look at its log before "
          "starting another one");
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begun);
    if (context.output == OutputFormat::kJson) {
      Json json = ToJson(*reply);
      json["ended_after_seconds"] = seconds;
      context.out << json.dump() << "\n";
      return 0;
    }
    Table table({"JOB", "STEP", "STOOD STILL AFTER", "STEP LOST"});
    for (const v1::DrainedJob& job : reply->jobs()) {
      table.AddRow({job.name(), absl::StrCat(job.committed_step()), FormatSeconds(job.seconds()),
                    job.between_steps() ? "no" : "computed again"});
    }
    if (reply->jobs_size() > 0) context.out << table.Text();
    context.out << "drained " << reply->jobs_size() << (reply->jobs_size() == 1 ? " job" : " jobs")
                << ", ended after " << FormatSeconds(seconds)
                << "; start shardd again on the same state directory to go on\n";
    return 0;
  }

 private:
  double deadline_seconds_ = 30;
};

}  // namespace

std::unique_ptr<Command> MakeDrainCommand() { return std::make_unique<DrainCommand>(); }

}  // namespace shardd::cli
