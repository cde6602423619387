#include "trainer/flags.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace shardd::trainer {
namespace {

constexpr size_t kColumns = 80;
constexpr size_t kIndent = 6;

// `text` in lines of at most kColumns, each indented.
std::string Wrapped(const std::string& text) {
  std::string out, line;
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!line.empty() && kIndent + line.size() + 1 + word.size() > kColumns) {
      absl::StrAppend(&out, std::string(kIndent, ' '), line, "\n");
      line.clear();
    }
    absl::StrAppend(&line, line.empty() ? "" : " ", word);
  }
  absl::StrAppend(&out, std::string(kIndent, ' '), line, "\n");
  return out;
}

std::string Number(double value) { return absl::StrCat(value); }

}  // namespace

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

void FlagSet::Section(std::string title) { section_ = std::move(title); }

void FlagSet::Add(Flag flag) {
  flag.section = section_;
  flags_.push_back(std::move(flag));
}

void FlagSet::Integer(std::string name, int64_t* target, int64_t least, std::string help) {
  auto set = [target, least](const std::string& text) -> std::string {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < least) {
      return absl::StrCat("an integer of at least ", least);
    }
    *target = value;
    return "";
  };
  Add({std::move(name), "", "N", absl::StrCat(*target), std::move(help), std::move(set)});
}

void FlagSet::Real(std::string name, double* target, double least, std::string help) {
  auto set = [target, least](const std::string& text) -> std::string {
    double value = 0;
    // The comparison refuses NaN; the bound, infinity.
    if (!absl::SimpleAtod(text, &value) || !(value >= least) || value > 1e300) {
      return absl::StrCat("a number of at least ", least);
    }
    *target = value;
    return "";
  };
  Add({std::move(name), "", "X", Number(*target), std::move(help), std::move(set)});
}

void FlagSet::Text(std::string name, std::string* target, std::string value, std::string help) {
  auto set = [target](const std::string& text) -> std::string {
    *target = text;
    return "";
  };
  Add({std::move(name), "", std::move(value), *target, std::move(help), std::move(set)});
}

void FlagSet::List(std::string name, std::vector<std::string>* target, std::string value,
                   std::string help) {
  auto set = [target](const std::string& text) -> std::string {
    if (text.empty()) return "not empty";
    target->push_back(text);
    return "";
  };
  Add({std::move(name), "", std::move(value), "", std::move(help), std::move(set)});
}

void FlagSet::Choice(std::string name, std::string* target, std::vector<std::string> choices,
                     std::string help) {
  const std::string list = absl::StrJoin(choices, "|");
  auto set = [target, choices = std::move(choices), list](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
      return absl::StrCat("one of ", list);
    }
    *target = text;
    return std::string();
  };
  Add({std::move(name), "", list, *target, std::move(help), std::move(set)});
}

void FlagSet::Switch(std::string name, bool* target, std::string help) {
  auto set = [target](const std::string& text) -> std::string {
    if (text != "true" && text != "false") return "true or false";
    *target = text == "true";
    return "";
  };
  Add({std::move(name), "", "", "", std::move(help), std::move(set)});
}

const FlagSet::Flag* FlagSet::Find(std::string_view name) const {
  for (const Flag& flag : flags_) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

absl::Status FlagSet::Unknown(const std::string& name) const {
  const Flag* nearest = nullptr;
  size_t best = 0;
  for (const Flag& flag : flags_) {
    const size_t distance = EditDistance(name, flag.name);
    if (nearest == nullptr || distance < best) {
      nearest = &flag;
      best = distance;
    }
  }
  std::string remedy = "see --help";
  if (nearest != nullptr) {
    remedy = absl::StrCat("the nearest flag is --", nearest->name, " (see --help)");
  }
  return absl::InvalidArgumentError(absl::StrCat("--", name, " is no flag; ", remedy));
}

absl::Status FlagSet::Parse(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.size() < 3 || argument.compare(0, 2, "--") != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", argument, "' is no flag; flags are written --name=value (see --help)"));
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Flag* flag = Find(name);
    if (flag == nullptr) return Unknown(name);
    std::string value = "true";  // of a switch
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (!flag->value.empty()) {
      if (i + 1 == arguments.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", name, " lacks its value; write --", name, "=", flag->value));
      }
      value = arguments[++i];
    }
    const std::string expected = flag->set(value);
    if (!expected.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, "=", value, " is refused; it must be ", expected));
    }
  }
  return absl::OkStatus();
}

std::string FlagSet::Help() const {
  std::string out, section;
  for (const Flag& flag : flags_) {
    if (flag.section != section) {
      section = flag.section;
      absl::StrAppend(&out, "\n", section, "\n");
    }
    absl::StrAppend(&out, "  --", flag.name, flag.value.empty() ? "" : "=", flag.value);
    if (!flag.fallback.empty()) absl::StrAppend(&out, "  [", flag.fallback, "]");
    absl::StrAppend(&out, "\n", Wrapped(flag.help));
  }
  return out;
}

}  // namespace shardd::trainer
