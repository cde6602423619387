// shardctl optimizer check: tries a shared object with an optimizer, as the daemon does.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "kernels/user_optimizer.h"

namespace shardd::cli {

namespace {

class OptimizerCheckCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec = new CommandSpec{
        .name = "optimizer check",
        .arguments = "FILE.so",
        .min_words = 1,
        .max_words = 1,
        .summary = "try a shared object with an optimizer of your own",
        .help =
            "Loads FILE.so in a process of its own and tries its formula: ABI version, names,\n"
            "the same bits when an update is repeated or cut into pieces, no write beyond its\n"
            "elements, finite values from states of 0. The daemon does the same with what\n"
            "optimizer_libraries names. No daemon is asked.\n\n"
            "  shardctl optimizer check ./adabelief.so"};
    return *spec;
  }

  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    const kernels::LoadedOptimizer loaded = kernels::LoadUserOptimizer(words[0]);
    if (loaded.optimizer == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(words[0], ": ", loaded.problem));
    }
    const std::string name(loaded.optimizer->name());
    if (kernels::FindOptimizer(name) != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(words[0], ": shardd has an optimizer named ",
                                                     name, "; give it another name"));
    }
    std::vector<std::string> states;
    for (const std::string_view state : loaded.optimizer->state_names()) states.emplace_back(state);
    if (context.output == OutputFormat::kJson) {
      context.out << Json{{"name", name}, {"states", states}}.dump() << "\n";
    } else {
      context.out << NamedValues({{"optimizer", name},
                                  {"states", states.empty() ? "none" : absl::StrJoin(states, ", ")},
                                  {"verdict", "as it must be"}});
    }
    return 0;
  }
};

}  // namespace

std::unique_ptr<Command> MakeOptimizerCheckCommand() {
  return std::make_unique<OptimizerCheckCommand>();
}

}  // namespace shardd::cli
