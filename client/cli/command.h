// shardctl's commands, and how a command line finds its own.
#ifndef SHARDD_CLIENT_CLI_COMMAND_H_
#define SHARDD_CLIENT_CLI_COMMAND_H_

#include <istream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/admin_channel.h"
#include "client/cli/environment.h"
#include "client/cli/flags.h"
#include "client/cli/output.h"

namespace shardd::cli {

// What every command gets.
struct Context {
  const Environment& environment;
  std::istream& in;
  std::ostream& out;
  std::ostream& err;
  OutputFormat output = OutputFormat::kTable;
  std::string address;  // --address
  absl::Duration connect_timeout;

  // Connects to the daemon that flags and environment name.
  absl::StatusOr<std::unique_ptr<AdminChannel>> Connect() const;
};

struct CommandSpec {
  std::string name;            // one or two words: "status", "job delete"
  std::string arguments = "";  // as in the usage line: "[JOB]"
  size_t min_words = 0;
  size_t max_words = 0;
  std::string summary = "";  // half a line
  std::string help = "";     // paragraphs: what it does, what it prints, an example
  // The first word that is no flag begins somebody else's command line.
  bool command_follows = false;
};

class Command {
 public:
  virtual ~Command() = default;
  virtual const CommandSpec& spec() const = 0;
  virtual void AddFlags(FlagSet* flags) {}
  // `words` has spec().min_words to max_words elements. Returns the exit code.
  virtual absl::StatusOr<int> Run(const Context& context,
                                  const std::vector<std::string>& words) = 0;
};

// Runs the command line `arguments` (without the program's name). Returns the exit
// code: the command's own, 1 for an error, 2 for a command line that is not valid.
// Errors go to `err`, as {"error": ...} with --output=json.
int RunCommandLine(const std::vector<std::unique_ptr<Command>>& commands,
                   const Environment& environment, const std::vector<std::string>& arguments,
                   std::istream& in, std::ostream& out, std::ostream& err);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_COMMAND_H_
