// How the directories of checkpoints are called, and which of them to take.
#ifndef SHARDD_PROTO_CHECKPOINT_DIRECTORY_H_
#define SHARDD_PROTO_CHECKPOINT_DIRECTORY_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace shardd::checkpoint {

// One complete directory: a member of the set that is the checkpoint of a step.
struct StepDirectory {
  uint64_t step = 0;
  uint32_t member = 1;
  uint32_t members = 1;
  bool operator==(const StepDirectory&) const = default;
};

// "step-0000000100", or "step-0000000100.2-of-3".
std::string DirectoryName(const StepDirectory& directory);
// While it is built: "." + name + ".new".
std::string TemporaryName(const StepDirectory& directory);
// Nothing for any other name.
std::optional<StepDirectory> ParseDirectoryName(const std::string& name);
// What an interrupted save or export left.
bool IsTemporaryName(const std::string& name);

// Among the names in a job's directory, ascending by step, then member.
std::vector<StepDirectory> StepsAmong(const std::vector<std::string>& names);

// The newest step that all have, given the complete steps of each daemon: what a set restores
// from. Nothing when they have none in common, or there is nobody.
std::optional<uint64_t> NewestCommonStep(std::span<const std::vector<uint64_t>> of_each);

// The newest step of which all members are among `directories`.
std::optional<uint64_t> NewestCompleteStep(std::span<const StepDirectory> directories);

}  // namespace shardd::checkpoint

#endif  // SHARDD_PROTO_CHECKPOINT_DIRECTORY_H_
