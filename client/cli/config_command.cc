// shardctl config explain: what becomes of each key of a DeepSpeed configuration.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/deepspeed_keys.h"

namespace shardd::cli {

namespace {

class ConfigExplainCommand : public Command {
 public:
  const CommandSpec& spec() const override {
    static const CommandSpec* spec =
        new CommandSpec{.name = "config explain",
                        .arguments = "FILE",
                        .min_words = 1,
                        .max_words = 1,
                        .summary = "what shardd.initialize makes of a DeepSpeed configuration",
                        .help =
                            "Prints every key of DeepSpeed's JSON with what becomes of it:\n"
                            "  honoured  it does what it says\n"
                            "  always    what it asks for holds anyway\n"
                            "  off       it asks for nothing\n"
                            "  refused   with the reason and what to use instead\n"
                            "  unknown   no key of DeepSpeed\n"
                            "Ends with 1 when some key is refused or unknown: shardd.initialize "
                            "would not take the\n"
                            "file. Needs no daemon.\n\n"
                            "  shardctl config explain ds_config.json"};
    return *spec;
  }

  absl::StatusOr<int> Run(const Context& context, const std::vector<std::string>& words) override {
    std::ifstream file(words[0], std::ios::binary);
    if (!file) {
      return absl::NotFoundError(
          absl::StrCat("cannot read ", words[0], "; give the path of a DeepSpeed configuration"));
    }
    std::ostringstream text;
    text << file.rdbuf();
    absl::StatusOr<std::vector<ExplainedKey>> keys = ExplainDeepSpeed(text.str(), words[0]);
    if (!keys.ok()) return keys.status();
    Print(context, *keys);
    return std::any_of(keys->begin(), keys->end(), [](const ExplainedKey& key) {
      return key.fate == "refused" || key.fate == "unknown";
    });
  }

 private:
  static void Print(const Context& context, const std::vector<ExplainedKey>& keys) {
    Table table({"KEY", "VALUE", "FATE", "WHAT BECOMES OF IT"});
    Json json = Json::array();
    for (const ExplainedKey& key : keys) {
      table.AddRow({key.key, key.value.dump(), key.fate, key.text});
      json.push_back(
          {{"key", key.key}, {"value", key.value}, {"fate", key.fate}, {"text", key.text}});
    }
    context.out << (context.output == OutputFormat::kJson ? json.dump() + "\n" : table.Text());
  }
};

}  // namespace

std::unique_ptr<Command> MakeConfigExplainCommand() {
  return std::make_unique<ConfigExplainCommand>();
}

}  // namespace shardd::cli
