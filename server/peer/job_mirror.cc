#include "server/peer/job_mirror.h"

#include <pthread.h>
#include <sys/random.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/peer/mirrored_files.h"

namespace shardd::peer {

namespace {

// On the way of one job, and not acknowledged.
constexpr uint64_t kWindowBytes = 32 << 20;
constexpr uint64_t kAskBytes = 4 << 20;
constexpr absl::Duration kRetry = absl::Seconds(1);

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0 && getrandom(&value, sizeof(value), 0) < 0) {
  }
  return value;
}

bool IsZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::chrono::system_clock::time_point Chrono(absl::Time time) {
  return absl::ToChronoTime(std::min(time, absl::Now() + absl::Hours(1)));
}

}  // namespace

std::string MirrorStatus::Text() const {
  switch (state) {
    case MirrorState::kInStep:
      return why.empty() ? "in step" : absl::StrCat("behind: ", why);
    case MirrorState::kCopying:
      if (!why.empty()) return absl::StrCat("behind: ", why);
      return absl::StrCat("being copied: ", bytes == 0 ? 0 : copied * 100 / bytes, " %");
    case MirrorState::kBehind:
      return absl::StrCat("behind: ", why);
  }
  return "";
}

JobMirror::JobMirror(Options options)
    : options_(std::move(options)),
      mirrored_(std::make_unique<MirroredFileSystem>(options_.files, options_.failpoints,
                                                     options_.directory, this)),
      reached_(options_.reached),
      session_(RandomU64()) {}

JobMirror::~JobMirror() { Stop(); }

env::FileSystem* JobMirror::files() { return mirrored_.get(); }

void JobMirror::Start() {
  copier_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "shardd-mirror");
    CopierMain();
  });
}

void JobMirror::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    forwarding_ = false;
    state_ = MirrorState::kBehind;
    why_ = "this daemon is ending";
  }
  changed_.notify_all();
  if (copier_.joinable()) copier_.join();
}

MirrorStatus JobMirror::status() const {
  const std::lock_guard lock(mutex_);
  MirrorStatus status;
  status.peer = options_.peer;
  status.state = state_;
  if (state_ == MirrorState::kBehind) {
    status.why = reached_ ? why_ : absl::StrCat("peer ", options_.peer, " is not reached");
  }
  if (!asked_.empty() && absl::Now() - progress_ > options_.patience) status.why = Silence();
  status.copied = copied_;
  status.bytes = copy_bytes_;
  return status;
}

std::string JobMirror::Silence() const {
  return absl::StrCat("peer ", options_.peer, " has acknowledged nothing for ",
                      absl::FormatDuration(absl::Trunc(absl::Now() - progress_, absl::Seconds(1))),
                      " (journal.mirror_seconds); see whether it runs and is reached");
}

// --- The order of operations.

bool JobMirror::HasRoom(uint64_t bytes) const {
  return sent_bytes_ == acknowledged_bytes_ ||
         sent_bytes_ - acknowledged_bytes_ + bytes <= kWindowBytes;
}

bool JobMirror::AwaitProgress(Lock* lock, const std::function<bool()>& done) {
  const absl::Time begun = absl::Now();
  while (!done()) {
    const absl::Time until = std::max(begun, progress_) + options_.patience;
    if (absl::Now() >= until) return false;
    changed_.wait_until(*lock, Chrono(until));
  }
  return true;
}

JobMirror::Ticket JobMirror::Send(Mirror operation, std::string bytes) {
  sent_bytes_ += bytes.size();
  switch (operation.operation()) {
    case Mirror::BEGIN:
    case Mirror::COMPLETE:
    case Mirror::SYNC_FILE:
    case Mirror::SYNC_NAMES:
      operation.set_answer(true);
      break;
    default:
      operation.set_answer(sent_bytes_ - asked_bytes_ >= kAskBytes);
  }
  operation.set_tag(options_.tag);
  operation.set_session(session_);
  operation.set_number(++number_);
  if (operation.answer()) {
    if (asked_.empty()) progress_ = absl::Now();
    asked_.push_back({number_, sent_bytes_});
    asked_bytes_ = sent_bytes_;
  }
  Message message;
  message.header.set_job(options_.job);
  *message.header.mutable_mirror() = std::move(operation);
  message.bytes = std::move(bytes);
  options_.links->Send(options_.peer, std::move(message));
  return {session_, number_};
}

JobMirror::Ticket JobMirror::Forward(Mirror operation, std::string bytes) {
  Lock lock(mutex_);
  if (!forwarding_) return {};
  const uint64_t session = session_;
  const auto over = [&] { return session_ != session || !forwarding_; };
  if (!AwaitProgress(&lock, [&] { return over() || HasRoom(bytes.size()); })) {
    FallBehind(Silence(), kRetry);
  }
  if (over()) return {};
  return Send(std::move(operation), std::move(bytes));
}

absl::Status JobMirror::Await(const Ticket& ticket) {
  Lock lock(mutex_);
  // A later session's copy has all that was written before.
  const auto done = [&] {
    return state_ == MirrorState::kInStep &&
           (session_ != ticket.session || acknowledged_ >= ticket.number);
  };
  const auto over = [&] {
    return stop_ || failed_ || (options_.degrade && state_ != MirrorState::kInStep);
  };
  const bool in_time = AwaitProgress(&lock, [&] { return over() || done(); });
  if (done()) return absl::OkStatus();
  std::string why = !in_time ? Silence() : !reached_ ? "it is not reached" : why_;
  if (!in_time && options_.degrade) FallBehind(why, kRetry);
  if (stop_ && !options_.degrade) why = "this daemon is ending";
  if (options_.degrade) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the mirror of job '", options_.job, "' at peer ",
                                             options_.peer, " is not in step: ", why));
}

void JobMirror::OnAnswer(const v1::PeerMessage::MirrorAnswer& answer) {
  const std::lock_guard lock(mutex_);
  if (answer.session() != session_ || stop_) return;
  progress_ = absl::Now();
  if (answer.code() != 0) return FallBehind(answer.text(), kRetry);
  acknowledged_ = std::max(acknowledged_, answer.number());
  while (!asked_.empty() && asked_.front().number <= answer.number()) {
    acknowledged_bytes_ = asked_.front().sent_bytes;
    asked_.pop_front();
  }
  changed_.notify_all();
}

void JobMirror::OnNewProcess() {
  const std::lock_guard lock(mutex_);
  const bool first = !reached_;
  reached_ = true;
  if (!first) FallBehind(absl::StrCat("peer ", options_.peer, " has ended"), absl::ZeroDuration());
  changed_.notify_all();
}

void JobMirror::Break(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (forwarding_) FallBehind(why, kRetry);
}

void JobMirror::FallBehind(const std::string& why, absl::Duration pause) {
  state_ = MirrorState::kBehind;
  why_ = why;
  forwarding_ = false;
  failed_ = pause > absl::ZeroDuration();
  ++session_;
  asked_.clear();
  retry_at_ = absl::Now() + pause;
  if (said_ != why && !stop_) {
    said_ = why;
    options_.log(absl::StrCat(
        "job ", options_.job, ": its mirror at peer ", options_.peer, " is behind: ", why,
        options_.degrade ? "; the job goes on with durability = node meanwhile"
                         : "; steps wait until it is in step again"));
  }
  changed_.notify_all();
}

// --- A copy of the whole.

void JobMirror::CopierMain() {
  Lock lock(mutex_);
  while (!stop_) {
    const absl::Time now = absl::Now();
    if (state_ != MirrorState::kBehind || !reached_) {
      changed_.wait(lock);
      continue;
    }
    if (now < retry_at_) {
      changed_.wait_until(lock, Chrono(retry_at_));
      continue;
    }
    const uint64_t session = ++session_;
    number_ = acknowledged_ = sent_bytes_ = asked_bytes_ = acknowledged_bytes_ = 0;
    copied_ = copy_bytes_ = 0;
    asked_.clear();
    progress_ = now;
    lock.unlock();
    const absl::Status status = Copy(session);
    lock.lock();
    if (!status.ok() && session_ == session && !stop_) {
      FallBehind(std::string(status.message()), kRetry);
    }
  }
}

// Returns when the copy is complete, or is not wanted any more (another session), or failed here.
absl::Status JobMirror::Copy(uint64_t session) {
  const auto over = [&] { return stop_ || session_ != session; };
  uint64_t total = 0;
  absl::StatusOr<std::vector<std::string>> names = options_.files->List(options_.directory);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    absl::StatusOr<env::FileInfo> info =
        options_.files->Stat(env::JoinPath(options_.directory, name));
    if (info.ok()) total += info->bytes;
  }
  {
    Lock lock(mutex_);
    if (over()) return absl::OkStatus();
    copy_bytes_ = total;
    Mirror begin;
    begin.set_operation(Mirror::BEGIN);
    begin.set_offset(total);
    Send(std::move(begin), "");
    changed_.wait(lock, [&] { return over() || acknowledged_ >= 1; });
    if (over()) return absl::OkStatus();
  }
  std::vector<CopiedFile> files;
  if (absl::Status s = CopyNames(session, &files); !s.ok()) return s;
  env::AlignedBuffer buffer(kMaxPieceBytes);
  for (const CopiedFile& copied : files) {
    const uint64_t bytes = copied.bytes;
    for (uint64_t offset = 0; offset < bytes; offset += kMaxPieceBytes) {
      {
        Lock lock(mutex_);
        // Not with the order held: the journal goes on.
        const bool room =
            AwaitProgress(&lock, [&] { return over() || HasRoom(2 * kMaxPieceBytes); });
        if (over()) return absl::OkStatus();
        if (!room) return absl::UnavailableError(Silence());
        copied_ += std::min<uint64_t>(kMaxPieceBytes, bytes - offset);
      }
      if (absl::Status s = CopyPiece(copied, offset, &buffer); !s.ok()) return s;
      options_.failpoints->Reach("mirror.copy.after_piece");
    }
  }
  Ticket complete;
  {
    const std::unique_lock order(order_);
    Mirror operation;
    operation.set_operation(Mirror::COMPLETE);
    complete = Forward(std::move(operation));
  }
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return over() || acknowledged_ >= complete.number; });
  if (over() || complete.session != session) return absl::OkStatus();
  state_ = MirrorState::kInStep;
  why_.clear();
  said_.clear();
  options_.log(absl::StrCat("job ", options_.job, ": its mirror at peer ", options_.peer,
                            " is in step (", total, " bytes copied)"));
  changed_.notify_all();
  return absl::OkStatus();
}

// From here on all that is done here is done there too.
absl::Status JobMirror::CopyNames(uint64_t session, std::vector<CopiedFile>* files) {
  const std::unique_lock order(order_);
  {
    const std::lock_guard lock(mutex_);
    if (stop_ || session_ != session) return absl::OkStatus();
    state_ = MirrorState::kCopying;
    forwarding_ = true;
    failed_ = false;
  }
  absl::StatusOr<std::vector<std::string>> names = options_.files->List(options_.directory);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    absl::StatusOr<env::FileInfo> info =
        options_.files->Stat(env::JoinPath(options_.directory, name));
    if (!info.ok()) return info.status();
    Mirror create;
    create.set_operation(Mirror::CREATE);
    create.set_file(name);
    Forward(std::move(create));
    Mirror allocate;
    allocate.set_operation(Mirror::ALLOCATE);
    allocate.set_file(name);
    allocate.set_offset(info->bytes);
    if (info->bytes > 0) Forward(std::move(allocate));
    files->push_back({mirrored_->Track(name), info->bytes});
  }
  return absl::OkStatus();
}

absl::Status JobMirror::CopyPiece(const CopiedFile& copied, uint64_t offset,
                                  env::AlignedBuffer* buffer) {
  // What the journal writes comes before or after it, here as there.
  const std::unique_lock order(order_);
  const std::string& name = *copied.name;
  absl::StatusOr<std::unique_ptr<env::File>> file =
      options_.files->Open(env::JoinPath(options_.directory, name), {.direct = true});
  if (absl::IsNotFound(file.status())) return absl::OkStatus();  // removed meanwhile, there too
  if (!file.ok()) return file.status();
  absl::StatusOr<size_t> read = (*file)->ReadAt(offset, buffer->span());
  if (!read.ok()) return read.status();
  const std::span<const std::byte> bytes(buffer->data(), *read);
  if (IsZero(bytes)) return absl::OkStatus();  // as it is there
  Mirror write;
  write.set_operation(Mirror::WRITE);
  write.set_file(name);
  write.set_offset(offset);
  Forward(std::move(write), std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  return absl::OkStatus();
}

}  // namespace shardd::peer
