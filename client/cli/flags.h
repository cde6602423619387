// Command-line flags of one command.
#ifndef SHARDD_CLIENT_CLI_FLAGS_H_
#define SHARDD_CLIENT_CLI_FLAGS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::cli {

// Flags are written --name=value or --name value, booleans also --name alone. "--"
// ends them. Targets must outlive the set and keep their value when not named.
class FlagSet {
 public:
  // `value` names the value in the help text, e.g. "N" or "SECONDS".
  void AddString(std::string name, std::string value, std::string help, std::string* target);
  void AddUint32(std::string name, std::string value, std::string help, uint32_t* target);
  void AddDouble(std::string name, std::string value, std::string help, double* target);
  void AddBool(std::string name, std::string help, bool* target);

  // Sets the targets and returns the words that are no flags. With
  // `stop_at_first_word` everything from the first such word on is returned as it
  // is: it is somebody else's command line. InvalidArgument: an unknown flag, with
  // the nearest valid one; a value that is missing or does not parse.
  absl::StatusOr<std::vector<std::string>> Parse(const std::vector<std::string>& arguments,
                                                 bool stop_at_first_word = false) const;

  // One line a flag.
  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string value;  // empty: a boolean
    std::string help;
    // False: the text is no such value.
    std::function<bool(const std::string&)> set;
    std::string expected;
  };
  absl::StatusOr<const Flag*> Find(const std::string& given) const;

  std::vector<Flag> flags_;
};

// The candidate nearest to `word` by edit distance; empty when none is near.
std::string Nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_FLAGS_H_
