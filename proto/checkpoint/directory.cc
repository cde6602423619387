#include "proto/checkpoint/directory.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardd::checkpoint {

std::string DirectoryName(const StepDirectory& directory) {
  std::string name = absl::StrFormat("step-%010d", directory.step);
  if (directory.members > 1) {
    absl::StrAppend(&name, ".", directory.member, "-of-", directory.members);
  }
  return name;
}

std::string TemporaryName(const StepDirectory& directory) {
  return absl::StrCat(".", DirectoryName(directory), ".new");
}

std::optional<StepDirectory> ParseDirectoryName(const std::string& name) {
  constexpr size_t kPrefix = 5;
  if (!absl::StartsWith(name, "step-")) return std::nullopt;
  StepDirectory directory;
  const size_t dot = name.find('.');
  if (!absl::SimpleAtoi(name.substr(kPrefix, dot == std::string::npos ? dot : dot - kPrefix),
                        &directory.step)) {
    return std::nullopt;
  }
  if (dot != std::string::npos) {
    const size_t of = name.find("-of-", dot);
    if (of == std::string::npos ||
        !absl::SimpleAtoi(name.substr(dot + 1, of - dot - 1), &directory.member) ||
        !absl::SimpleAtoi(name.substr(of + 4), &directory.members) || directory.member < 1 ||
        directory.member > directory.members) {
      return std::nullopt;
    }
  }
  // One name a directory: no other spelling of the same numbers.
  if (DirectoryName(directory) != name) return std::nullopt;
  return directory;
}

bool IsTemporaryName(const std::string& name) {
  return absl::StartsWith(name, ".") && absl::EndsWith(name, ".new");
}

std::vector<StepDirectory> StepsAmong(const std::vector<std::string>& names) {
  std::vector<StepDirectory> found;
  for (const std::string& name : names) {
    if (const auto directory = ParseDirectoryName(name)) found.push_back(*directory);
  }
  std::sort(found.begin(), found.end(), [](const StepDirectory& a, const StepDirectory& b) {
    return std::tie(a.step, a.members, a.member) < std::tie(b.step, b.members, b.member);
  });
  return found;
}

std::optional<uint64_t> NewestCommonStep(std::span<const std::vector<uint64_t>> of_each) {
  std::map<uint64_t, size_t> holders;
  for (const std::vector<uint64_t>& steps : of_each) {
    for (uint64_t step : std::set<uint64_t>(steps.begin(), steps.end())) ++holders[step];
  }
  for (auto it = holders.rbegin(); it != holders.rend(); ++it) {
    if (it->second == of_each.size()) return it->first;
  }
  return std::nullopt;
}

std::optional<uint64_t> NewestCompleteStep(std::span<const StepDirectory> directories) {
  // Sets of different sizes may lie here, from before and after a change of daemons.
  std::map<std::pair<uint64_t, uint32_t>, std::set<uint32_t>> present;
  for (const StepDirectory& d : directories) present[{d.step, d.members}].insert(d.member);
  for (auto it = present.rbegin(); it != present.rend(); ++it) {
    if (it->second.size() == it->first.second) return it->first.first;
  }
  return std::nullopt;
}

}  // namespace shardd::checkpoint
