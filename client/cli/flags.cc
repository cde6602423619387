#include "client/cli/flags.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/contract/config_path.h"

namespace shardd::cli {

namespace {

bool ParseBool(const std::string& text, bool* out) {
  if (text != "true" && text != "false") return false;
  *out = text == "true";
  return true;
}

}  // namespace

std::string Nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  // A word is near when at most a third of it was mistyped.
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    size_t distance = contract::EditDistance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

void FlagSet::AddString(std::string name, std::string value, std::string help,
                        std::string* target) {
  auto set = [target](const std::string& text) {
    *target = text;
    return true;
  };
  flags_.push_back({std::move(name), std::move(value), std::move(help), set, "text"});
}

void FlagSet::AddUint32(std::string name, std::string value, std::string help, uint32_t* target) {
  auto set = [target](const std::string& text) {
    uint32_t parsed;
    if (!absl::SimpleAtoi(text, &parsed)) return false;
    *target = parsed;
    return true;
  };
  flags_.push_back(
      {std::move(name), std::move(value), std::move(help), set, "a number from 0 to 4294967295"});
}

void FlagSet::AddDouble(std::string name, std::string value, std::string help, double* target) {
  auto set = [target](const std::string& text) {
    double parsed;
    if (!absl::SimpleAtod(text, &parsed) || !std::isfinite(parsed) || parsed < 0) return false;
    *target = parsed;
    return true;
  };
  flags_.push_back(
      {std::move(name), std::move(value), std::move(help), set, "a number that is not negative"});
}

void FlagSet::AddBool(std::string name, std::string help, bool* target) {
  auto set = [target](const std::string& text) { return ParseBool(text, target); };
  flags_.push_back({std::move(name), "", std::move(help), set, "true or false"});
}

absl::StatusOr<const FlagSet::Flag*> FlagSet::Find(const std::string& given) const {
  const std::string name = given == "h" ? "help" : given;
  std::vector<std::string> names;
  for (const Flag& flag : flags_) {
    if (flag.name == name) return &flag;
    names.push_back(flag.name);
  }
  std::string nearest = Nearest(name, names);
  return absl::InvalidArgumentError(
      nearest.empty() ? absl::StrCat("unknown flag --", name, ": see --help for those there are")
                      : absl::StrCat("unknown flag --", name, ": did you mean --", nearest, "?"));
}

absl::StatusOr<std::vector<std::string>> FlagSet::Parse(const std::vector<std::string>& arguments,
                                                        bool stop_at_first_word) const {
  std::vector<std::string> words;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    bool is_flag = argument.size() > 1 && argument[0] == '-';
    if (argument == "--" || (!is_flag && stop_at_first_word)) {
      words.insert(words.end(), arguments.begin() + i + (argument == "--"), arguments.end());
      return words;
    }
    if (!is_flag) {
      words.push_back(argument);
      continue;
    }
    size_t equals = argument.find('=');
    std::string name = argument.substr(0, equals);
    name.erase(0, name.find_first_not_of('-') == std::string::npos ? name.size()
                                                                   : name.find_first_not_of('-'));
    absl::StatusOr<const Flag*> flag = Find(name);
    if (!flag.ok()) return flag.status();
    std::string text;
    if (equals != std::string::npos) {
      text = argument.substr(equals + 1);
    } else if ((*flag)->value.empty()) {
      text = "true";
    } else if (i + 1 < arguments.size()) {
      text = arguments[++i];
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --", name, " needs a value: --", name, "=", (*flag)->value));
    }
    if (!(*flag)->set(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --", name, " must be ", (*flag)->expected, ", not '", text, "'"));
    }
  }
  return words;
}

std::string FlagSet::Help() const {
  size_t width = 0;
  auto left = [](const Flag& flag) {
    return absl::StrCat("  --", flag.name, flag.value.empty() ? "" : "=", flag.value);
  };
  for (const Flag& flag : flags_) width = std::max(width, left(flag).size());
  std::string text;
  for (const Flag& flag : flags_) {
    std::string start = left(flag);
    absl::StrAppend(&text, start, std::string(width + 2 - start.size(), ' '), flag.help, "\n");
  }
  return text;
}

}  // namespace shardd::cli
