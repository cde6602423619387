#include "server/step/upload.h"

#include "absl/strings/str_cat.h"

namespace shardd::step {

using contract::kParameterAlignment;

Upload::Upload(const contract::Layout* layout, bool complete) : layout_(layout) {
  if (complete) return;
  missing_ = layout->flat_elements() / kParameterAlignment;
  present_.assign(missing_, false);
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
  if (missing_ == 0) present_ = {};
}

std::string Upload::FirstMissing() const {
  for (uint64_t g = 0; g < present_.size(); ++g) {
    if (present_[g]) continue;
    const uint64_t begin = g * kParameterAlignment;
    const auto runs = layout_->runs({begin, begin + kParameterAlignment});
    if (!runs.empty()) return layout_->parameter(runs[0].parameter).name;
  }
  return "";
}

}  // namespace shardd::step
