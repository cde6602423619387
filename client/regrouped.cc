#include "client/regrouped.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace shardd {

namespace {

constexpr char kPayload[] = "shardd/regrouped";
constexpr size_t kStepBytes = 8;

}  // namespace

// next_step in eight little-endian bytes, then the blob.
absl::Status RegroupedStatus(const Regrouped& regrouped) {
  absl::Status status = absl::AbortedError(
      absl::StrCat("the rank group was formed anew; reload the trainer's state from the blob and "
                   "go on at step ",
                   regrouped.next_step));
  std::string payload;
  for (size_t i = 0; i < kStepBytes; ++i) {
    payload.push_back(static_cast<char>(regrouped.next_step >> (8 * i)));
  }
  payload += regrouped.blob;
  status.SetPayload(kPayload, absl::Cord(payload));
  return status;
}

std::optional<Regrouped> GetRegrouped(const absl::Status& status) {
  const auto cord = status.GetPayload(kPayload);
  if (!absl::IsAborted(status) || !cord || cord->size() < kStepBytes) return std::nullopt;
  const std::string payload(*cord);
  Regrouped regrouped;
  for (size_t i = 0; i < kStepBytes; ++i) {
    regrouped.next_step |= uint64_t{static_cast<unsigned char>(payload[i])} << (8 * i);
  }
  regrouped.blob = payload.substr(kStepBytes);
  return regrouped;
}

}  // namespace shardd
