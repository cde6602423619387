// Command-line flags: typed, listed in --help, unknown ones refused with the
// nearest that exists.
#ifndef SHARDD_TRAINER_FLAGS_H_
#define SHARDD_TRAINER_FLAGS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace shardd::trainer {

// A set of flags that point at the variables they set. "--name=value" and
// "--name value" are the same; a switch is "--name" or "--name=true|false".
class FlagSet {
 public:
  // Starts a section of the help text.
  void Section(std::string title);

  // The variable's current value is the default that help shows; it must outlive
  // the set. `help` is one sentence, `value` what the value is called in it.
  void Integer(std::string name, int64_t* target, int64_t least, std::string help);
  void Real(std::string name, double* target, double least, std::string help);
  void Text(std::string name, std::string* target, std::string value, std::string help);
  // May be given several times; each value is added.
  void List(std::string name, std::vector<std::string>* target, std::string value,
            std::string help);
  // One of `choices`.
  void Choice(std::string name, std::string* target, std::vector<std::string> choices,
              std::string help);
  void Switch(std::string name, bool* target, std::string help);

  // kInvalidArgument names the argument and the remedy. Arguments exclude argv[0].
  absl::Status Parse(const std::vector<std::string>& arguments);

  // All flags with their defaults, by section, 80 columns.
  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string section;
    std::string value;     // what help shows after "="; empty for a switch
    std::string fallback;  // the default, as text; empty: none is shown
    std::string help;
    // Returns an empty string, or what the value must be.
    std::function<std::string(const std::string&)> set;
  };
  void Add(Flag flag);
  const Flag* Find(std::string_view name) const;
  absl::Status Unknown(const std::string& name) const;

  std::string section_;
  std::vector<Flag> flags_;
};

// Least number of insertions, deletions, substitutions and neighbour swaps that
// turn a into b.
size_t EditDistance(std::string_view a, std::string_view b);

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_FLAGS_H_
