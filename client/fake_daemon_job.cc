// The fake daemon's job: rings, sums, decisions.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "client/fake_daemon.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"

namespace shardd {

namespace {

using contract::Range;

kernels::DType Kernel(v1::DType dtype) { return static_cast<kernels::DType>(dtype); }

}  // namespace

void FakeDaemon::Wake() {
  if (layout_ == nullptr) return;
  board().event.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&board().event), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
  changed_.notify_all();
}

const std::byte* FakeDaemon::Data(const Peer& peer, const contract::Descriptor& descriptor) const {
  const auto& header = *reinterpret_cast<const contract::RingHeader*>(peer.ring);
  return peer.ring + header.data_offset + descriptor.data_offset;
}

void FakeDaemon::ReadRings() {
  if (hold_rings_ || layout_ == nullptr) return;
  for (const auto& peer : sessions_) {
    if (peer->ring == nullptr || peer->closed) continue;
    const auto& header = *reinterpret_cast<const contract::RingHeader*>(peer->ring);
    const auto* queue =
        reinterpret_cast<const contract::Descriptor*>(peer->ring + contract::kSegmentPage);
    while (peer->read < header.head.load(std::memory_order_acquire)) {
      const contract::Descriptor descriptor = queue[peer->read & (header.queue_entries - 1)];
      peer->done.push_back(false);
      OnDescriptor(peer.get(), descriptor, peer->read++);
    }
  }
  TryDecide();
  Wake();
}

void FakeDaemon::OnDescriptor(Peer* peer, const contract::Descriptor& descriptor, uint64_t index) {
  const bool init = descriptor.kind == static_cast<uint8_t>(contract::DescriptorKind::kInit);
  if (init || descriptor.generation != generation_) {
    if (init && descriptor.job_tag == kJobTag) OnInit(*peer, descriptor);
    Release(peer, index);
  } else {
    OnGradient(peer, descriptor, index);
  }
}

void FakeDaemon::OnInit(const Peer& peer, const contract::Descriptor& descriptor) {
  std::memcpy(masters_.data() + descriptor.begin, Data(peer, descriptor),
              descriptor.count * sizeof(float));
  missing_elements_ -= descriptor.count;
  if (missing_elements_ > 0) return;
  PublishWeights();
  board().state.store(static_cast<uint32_t>(contract::BoardState::kReady));
}

void FakeDaemon::OnGradient(Peer* peer, const contract::Descriptor& descriptor, uint64_t index) {
  std::vector<Part>& parts = parts_[descriptor.bucket];
  auto at = parts.begin();
  while (at != parts.end() && at->descriptor.slot_lo < descriptor.slot_lo) ++at;
  parts.insert(at, {descriptor, peer, index});
  uint32_t slots = 0;
  for (const Part& part : parts) slots += part.descriptor.slot_hi - part.descriptor.slot_lo;
  if (slots == config_.slots()) Fold(descriptor.bucket);
}

void FakeDaemon::Fold(uint64_t bucket) {
  std::vector<kernels::SlotRange> nodes;
  std::vector<kernels::ReduceInput> inputs;
  for (const Part& part : parts_[bucket]) {
    nodes.push_back({part.descriptor.slot_lo, part.descriptor.slot_hi});
    inputs.push_back(
        {Data(*part.peer, part.descriptor), static_cast<kernels::DType>(part.descriptor.dtype)});
  }
  kernels::ReduceProgram program;
  kernels::SlotTreeProgram(config_.slots(), nodes, &program);
  const Range range = layout_->bucket_range(bucket);
  kernels::Reduce(kernels::Isa::kScalar, program, inputs, range.size(), sum_.data() + range.begin,
                  kernels::DType::kFloat32, nullptr);
  folded_[bucket] = true;
  for (const Part& part : parts_[bucket]) Release(part.peer, part.index);
  parts_.erase(bucket);
}

void FakeDaemon::Release(Peer* peer, uint64_t index) {
  peer->done[index] = true;
  while (peer->released < peer->done.size() && peer->done[peer->released]) ++peer->released;
  session_line(peer->line).released.store(peer->released, std::memory_order_release);
}

void FakeDaemon::TryDecide() {
  if (hold_decisions_ || !running_ || layout_ == nullptr ||
      folded_.size() < layout_->num_buckets()) {
    return;
  }
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    if (!AtRank(rank)->ended) return;
  }
  ++committed_;
  blob_ = AtRank(0)->ended->blob();
  const double lr = AtRank(0)->ended->groups(0).lr();
  const bool apply = next_result_ == v1::STEP_APPLIED;
  applied_ += apply ? 1 : 0;
  for (size_t i = 0; apply && i < masters_.size(); ++i) {
    masters_[i] -= static_cast<float>(lr) * sum_[i];
  }
  sums_[committed_] = sum_;
  folded_.clear();
  for (uint32_t rank = 0; rank < world_size_; ++rank) AtRank(rank)->ended.reset();
  v1::StepRecord& record = records_.emplace_back();
  record.set_step(committed_);
  record.set_applied(applied_);
  record.set_result(next_result_);
  record.set_reason(next_reason_);

  contract::Board& b = board();
  b.decision_seq.fetch_add(1, std::memory_order_acq_rel);
  b.applied.store(applied_);
  b.result.store(next_result_);
  b.loss.store(static_cast<double>(committed_) + 0.5);
  b.grad_norm.store(2.0 * static_cast<double>(committed_));
  b.loss_scale.store(config_.loss_scale().initial() * static_cast<double>(committed_ + 1));
  std::memset(b.skip_reason, 0, sizeof(b.skip_reason));
  std::strncpy(b.skip_reason, next_reason_.c_str(), sizeof(b.skip_reason) - 1);
  b.committed_step.store(committed_, std::memory_order_release);
  b.decision_seq.fetch_add(1, std::memory_order_release);
  next_result_ = v1::STEP_APPLIED;
  next_reason_.clear();
  if (weights_ready_) PublishWeights();
  Wake();
}

void FakeDaemon::PublishWeights() {
  kernels::MasterToWeight(kernels::Isa::kScalar, masters_.data(), masters_.size(),
                          weights_.data() + weights_offset_, Kernel(config_.weight_dtype()));
  for (uint64_t b = 0; b < layout_->num_buckets(); ++b) {
    bucket_line(b).ready_step.store(committed_, std::memory_order_release);
  }
}

void FakeDaemon::BeginGeneration() {
  ++generation_;
  running_ = false;
  parts_.clear();
  folded_.clear();
  for (const auto& peer : sessions_) {
    if (!peer->open) continue;
    peer->joined = false;
    peer->ended.reset();
    std::fill(peer->done.begin(), peer->done.end(), true);
    peer->released = peer->read;
    session_line(peer->line).released.store(peer->released, std::memory_order_release);
  }
  board().generation.store(generation_, std::memory_order_release);
  Wake();
}

}  // namespace shardd
