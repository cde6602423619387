#include "server/step/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

namespace shardd::step {

namespace {

void CopyText(const std::string& text, char* out, size_t size) {
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace

void BoardWriter::Wake() {
  board_->event.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &board_->event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void BoardWriter::Reset() { SetSleeping(false); }

void BoardWriter::PublishDecision(const DecisionNews& news) {
  // It is odd already where an earlier daemon died while it wrote: then nobody read that.
  if (board_->decision_seq.load(std::memory_order_relaxed) % 2 == 0) {
    board_->decision_seq.fetch_add(1, std::memory_order_acq_rel);
  }
  board_->committed_step.store(news.committed_step, std::memory_order_release);
  board_->applied.store(news.applied, std::memory_order_release);
  board_->result.store(news.result, std::memory_order_release);
  board_->loss.store(news.loss, std::memory_order_release);
  board_->grad_norm.store(news.grad_norm, std::memory_order_release);
  board_->loss_scale.store(news.loss_scale, std::memory_order_release);
  board_->clip_factor.store(news.clip_factor, std::memory_order_release);
  CopyText(news.skip_reason, board_->skip_reason, sizeof(board_->skip_reason));
  for (size_t g = 0; g < contract::kBoardGroups; ++g) {
    board_->lr[g].store(g < news.lr.size() ? news.lr[g] : 0, std::memory_order_release);
  }
  board_->decision_seq.fetch_add(1, std::memory_order_acq_rel);
  Wake();
}

void BoardWriter::SetGeneration(uint64_t generation) {
  board_->generation.store(generation, std::memory_order_release);
  Wake();
}

void BoardWriter::SetState(contract::BoardState state) {
  board_->state.store(static_cast<uint32_t>(state), std::memory_order_release);
  Wake();
}

void BoardWriter::Fail(const std::string& reason) {
  CopyText(reason, board_->failure, sizeof(board_->failure));
  SetState(contract::BoardState::kFailed);
}

void BoardWriter::SetSleeping(bool sleeps) {
  board_->daemon_sleeps.store(sleeps ? 1 : 0, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace shardd::step
