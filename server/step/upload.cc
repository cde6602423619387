#include "server/step/upload.h"

#include "absl/strings/str_cat.h"

namespace shardd::step {

using contract::kParameterAlignment;

namespace {

constexpr uint64_t kFrozenUnit = 64;

}  // namespace

Upload::Upload(const contract::Layout* layout, std::vector<uint64_t> frozen, bool complete)
    : layout_(layout), frozen_(std::move(frozen)) {
  if (complete) return;
  missing_ = layout->flat_elements() / kParameterAlignment;
  present_.assign(missing_, false);
  for (const uint64_t bytes : frozen_) {
    const uint64_t lines = (bytes + kFrozenUnit - 1) / kFrozenUnit;
    frozen_present_.emplace_back(lines, false);
    missing_ += lines;
  }
}

absl::Status Upload::CheckFrozen(uint32_t index, uint64_t begin, uint64_t count) const {
  if (index < frozen_.size() && begin % kFrozenUnit == 0 && count > 0 && begin <= frozen_[index] &&
      count <= frozen_[index] - begin &&
      (count % kFrozenUnit == 0 || begin + count == frozen_[index])) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "an upload of ", count, " bytes at ", begin, " of frozen parameter ", index, " of ",
      frozen_.size(), "; it must begin at a multiple of 64 inside, and end at one or with it"));
}

void Upload::MarkFrozen(uint32_t index, uint64_t begin, uint64_t count) {
  if (frozen_present_.empty()) return;
  std::vector<bool>& present = frozen_present_[index];
  for (uint64_t line = begin / kFrozenUnit; line * kFrozenUnit < begin + count; ++line) {
    if (!present[line]) {
      present[line] = true;
      --missing_;
    }
  }
  Forget();
}

void Upload::Forget() {
  if (missing_ > 0) return;
  present_ = {};
  frozen_present_ = {};
}

absl::Status Upload::Check(uint64_t begin, uint64_t count) const {
  const uint64_t flat = layout_->flat_elements();
  if (count == 0 || begin >= flat || count > flat - begin || begin % kParameterAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat("an upload of ", count, " elements at ", begin,
                                                   " of a flat space of ", flat,
                                                   "; it must begin at a multiple of 32 inside"));
  }
  const std::vector<contract::Run> runs = layout_->runs({begin, begin + count});
  if (runs.size() != 1 || runs[0].range.size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("an upload of ", count, " elements at ", begin,
                     " is not inside one parameter; upload each parameter by itself"));
  }
  const contract::Range parameter = layout_->parameter_range(runs[0].parameter);
  if (count % kParameterAlignment != 0 && begin + count != parameter.end) {
    return absl::InvalidArgumentError(
        absl::StrCat("an upload of ", count, " elements to parameter '",
                     layout_->parameter(runs[0].parameter).name, "' ends between multiples of 32"));
  }
  return absl::OkStatus();
}

void Upload::Mark(uint64_t begin, uint64_t count) {
  if (present_.empty()) return;
  const uint64_t last = (begin + count + kParameterAlignment - 1) / kParameterAlignment;
  for (uint64_t g = begin / kParameterAlignment; g < last; ++g) {
    if (!present_[g]) {
      present_[g] = true;
      --missing_;
    }
  }
  Forget();
}

std::string Upload::FirstMissing() const {
  for (uint64_t g = 0; g < present_.size(); ++g) {
    if (present_[g]) continue;
    const uint64_t begin = g * kParameterAlignment;
    const auto runs = layout_->runs({begin, begin + kParameterAlignment});
    if (!runs.empty()) return layout_->parameter(runs[0].parameter).name;
  }
  for (size_t f = 0; f < frozen_present_.size(); ++f) {
    for (const bool present : frozen_present_[f]) {
      if (!present) return absl::StrCat("(frozen) ", f);
    }
  }
  return "";
}

}  // namespace shardd::step
