// Jobs that begin with moments and step counts, not with zeros.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/env/fault_guard.h"
#include "server/step/job.h"

namespace shardd::step {

namespace {

// More steps than anybody trains; what a product of that many betas is, is known.
constexpr uint64_t kMostApplied = uint64_t{1} << 40;

// beta multiplied with itself as often as steps would have.
double Power(double beta, uint64_t times) {
  double product = 1;
  for (uint64_t i = 0; i < times && product > 0 && product != product * beta; ++i) product *= beta;
  return product;
}

}  // namespace

void Job::OnMoment(Member* member, const contract::Descriptor& d) {
  const uint64_t index = member->ring->last_index();
  const auto refuse = [&](const std::string& why) {
    Refuse(member, absl::InvalidArgumentError(
                       absl::StrCat("an upload of a moment of job '", name(), "': ", why)));
  };
  if (span_ != nullptr) return refuse("the job spans daemons; load its state on one node");
  if (upload_.complete()) return refuse("the job has all of its weights");
  if (absl::Status status = upload_.Check(d.begin, d.count); !status.ok()) {
    return Refuse(member, std::move(status));
  }
  const size_t moment = d.bucket;
  const uint64_t bytes = d.count * sizeof(float);
  if (!segments_->chunk(0).has_moment(moment)) {
    return refuse(absl::StrCat("the optimizer has no moment ", moment));
  }
  if (d.step == 0 || d.step > kMostApplied) {
    return refuse(absl::StrCat(d.step, " steps were applied, it says"));
  }
  if (d.dtype != static_cast<uint8_t>(kernels::DType::kFloat32) || d.data_offset % 64 != 0 ||
      d.data_offset > member->ring->data_bytes() ||
      bytes > member->ring->data_bytes() - d.data_offset) {
    return refuse("its data is not fp32 in the ring");
  }
  const std::byte* from = member->ring->data(d.data_offset);
  const void* fault = env::RunGuarded([&] {
    for (uint64_t at = 0; at < d.count;) {
      const uint64_t element = d.begin + at;
      const uint64_t inside = element % layout_.chunk_elements();
      const uint64_t part = std::min(d.count - at, layout_.chunk_elements() - inside);
      const store::ChunkView view = segments_->chunk(element / layout_.chunk_elements());
      view.Write(moment + 1, inside, part, reinterpret_cast<const float*>(from) + at);
      at += part;
    }
  });
  if (fault != nullptr) return Refuse(member, absl::DataLossError("the ring's memory is gone"));
  NoteApplied(d.begin, d.step);
  ReleaseDescriptor(member, index);
  Wake();
}

void Job::NoteApplied(uint64_t element, uint64_t applied) {
  for (size_t p = 0; p < layout_.num_parameters(); ++p) {
    const contract::Range range = layout_.parameter_range(p);
    if (element < range.begin || element >= range.end) continue;
    contract::ParameterEntry& entry = log_.table(0)[p];
    if (entry.applied == applied) return;  // of an earlier part of it
    const v1::Hyperparameters& hyper =
        created_config().groups(static_cast<int>(layout_.parameter(p).group)).hyper();
    entry.applied = applied;
    entry.beta1_product = Power(hyper.beta1(), applied);
    entry.beta2_product = Power(hyper.beta2(), applied);
    return;
  }
}

}  // namespace shardd::step
