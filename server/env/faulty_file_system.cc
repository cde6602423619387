#include "server/env/faulty_file_system.h"

#include <fnmatch.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/env/unsynced_log.h"

namespace shardd::env {

namespace {

constexpr std::array<std::string_view, 14> kOperations = {
    "open",  "create",  "read",   "write",  "sync", "preallocate", "truncate",
    "mkdir", "syncdir", "rename", "remove", "list", "stat",        "*"};

absl::Status Wrong(const std::string& rule, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "fault rule '", rule, "': ", why, "; give PATTERN:OP:N:ACTION, e.g. '*/log-*:sync:2:eio'"));
}

absl::Status ParseCount(const std::string& rule, const std::string& text, FaultRule* out) {
  std::string first = text, last = text;
  if (const size_t dash = text.find('-'); dash != std::string::npos) {
    first = text.substr(0, dash);
    last = text.substr(dash + 1);
  } else if (!text.empty() && text.back() == '+') {
    first = text.substr(0, text.size() - 1);
    last = absl::StrCat(std::numeric_limits<uint64_t>::max());
  }
  if (!absl::SimpleAtoi(first, &out->first) || !absl::SimpleAtoi(last, &out->last) ||
      out->first == 0 || out->last < out->first) {
    return Wrong(rule, absl::StrCat("'", text, "' is none of N, N-M, N+ from 1"));
  }
  return absl::OkStatus();
}

absl::Status ParseAction(const std::string& rule, const std::string& text, FaultRule* out) {
  if (text == "eio") {
    out->action = FaultRule::Action::kEio;
  } else if (text == "enospc") {
    out->action = FaultRule::Action::kEnospc;
  } else if (text == "wait") {
    out->action = FaultRule::Action::kWait;
  } else if (text == "kill") {
    out->action = FaultRule::Action::kKill;
  } else if (text.starts_with("short=") && absl::SimpleAtoi(text.substr(6), &out->short_bytes)) {
    out->action = FaultRule::Action::kShort;
  } else {
    return Wrong(rule,
                 absl::StrCat("action '", text, "' is none of eio, enospc, short=K, wait, kill"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FaultPlan> ParseFaultPlan(const std::string& text) {
  FaultPlan plan;
  const std::vector<std::string> rules = absl::StrSplit(text, ',', absl::SkipEmpty());
  for (const std::string& rule : rules) {
    if (rule == "unsynced") {
      plan.unsynced = true;
      continue;
    }
    const std::vector<std::string> fields = absl::StrSplit(rule, ':');
    if (fields.size() != 4) return Wrong(rule, absl::StrCat("it has ", fields.size(), " fields"));
    FaultRule parsed;
    parsed.pattern = fields[0];
    parsed.operation = fields[1];
    if (std::find(kOperations.begin(), kOperations.end(), fields[1]) == kOperations.end()) {
      return Wrong(rule, absl::StrCat("there is no operation '", fields[1], "'"));
    }
    if (absl::Status s = ParseCount(rule, fields[2], &parsed); !s.ok()) return s;
    if (absl::Status s = ParseAction(rule, fields[3], &parsed); !s.ok()) return s;
    plan.rules.push_back(std::move(parsed));
  }
  return plan;
}

class FaultyFile final : public File {
 public:
  FaultyFile(FaultyFileSystem* files, std::unique_ptr<File> base)
      : files_(files), base_(std::move(base)) {}

  const std::string& path() const override { return base_->path(); }
  bool direct() const override { return base_->direct(); }

  absl::StatusOr<size_t> ReadAt(uint64_t offset, std::span<std::byte> out) override {
    const FaultyFileSystem::Fault fault = files_->Check("read", path());
    if (fault.is_short) {
      const size_t wanted = std::min<size_t>(fault.short_bytes, out.size());
      std::vector<std::byte> all(out.size() + kDirectAlignment);
      void* aligned = all.data();
      size_t space = all.size();
      std::align(kDirectAlignment, out.size(), aligned, space);
      absl::StatusOr<size_t> n =
          base_->ReadAt(offset, {static_cast<std::byte*>(aligned), out.size()});
      if (!n.ok()) return n;
      std::copy_n(static_cast<std::byte*>(aligned), std::min(wanted, *n), out.begin());
      return std::min(wanted, *n);
    }
    if (!fault.status.ok()) return fault.status;
    return base_->ReadAt(offset, out);
  }

  absl::Status WriteAt(uint64_t offset,
                       std::span<const std::span<const std::byte>> parts) override {
    const FaultyFileSystem::Fault fault = files_->Check("write", path());
    if (!fault.status.ok() && !fault.is_short) return fault.status;
    std::vector<std::span<const std::byte>> taken;
    uint64_t bytes = 0;
    for (const auto& part : parts) {
      const uint64_t left = fault.is_short ? fault.short_bytes - bytes : part.size();
      taken.push_back(part.subspan(0, std::min<uint64_t>(part.size(), left)));
      bytes += taken.back().size();
    }
    const std::lock_guard lock(files_->log_mutex_);
    if (files_->unsynced_) LogContent(path(), offset, bytes);
    if (absl::Status status = base_->WriteAt(offset, taken); !status.ok()) return status;
    return fault.status;
  }

  absl::Status Sync() override {
    const FaultyFileSystem::Fault fault = files_->Check("sync", path());
    if (!fault.status.ok()) return fault.status;
    const std::lock_guard lock(files_->log_mutex_);
    if (absl::Status status = base_->Sync(); !status.ok()) return status;
    if (files_->unsynced_) ForgetContent(path());
    return absl::OkStatus();
  }

  absl::Status Preallocate(uint64_t bytes) override {
    const FaultyFileSystem::Fault fault = files_->Check("preallocate", path());
    if (!fault.status.ok()) return fault.status;
    const std::lock_guard lock(files_->log_mutex_);
    if (files_->unsynced_) LogContent(path(), 0, 0);
    return base_->Preallocate(bytes);
  }

  absl::Status Truncate(uint64_t bytes) override {
    const FaultyFileSystem::Fault fault = files_->Check("truncate", path());
    if (!fault.status.ok()) return fault.status;
    const std::lock_guard lock(files_->log_mutex_);
    if (files_->unsynced_) LogContent(path(), bytes, std::numeric_limits<uint64_t>::max());
    return base_->Truncate(bytes);
  }

  absl::StatusOr<uint64_t> Size() override { return base_->Size(); }
  void DropCache(uint64_t offset, uint64_t bytes) override { base_->DropCache(offset, bytes); }

 private:
  FaultyFileSystem* files_;
  const std::unique_ptr<File> base_;
};

FaultyFileSystem::FaultyFileSystem(FileSystem* base, FaultPlan plan)
    : base_(base), unsynced_(plan.unsynced), rules_(std::move(plan.rules)) {}

FaultyFileSystem::~FaultyFileSystem() { Release(); }

void FaultyFileSystem::SetRules(std::vector<FaultRule> rules) {
  const std::lock_guard lock(mutex_);
  rules_ = std::move(rules);
  ++released_;
  changed_.notify_all();
}

void FaultyFileSystem::Release() {
  const std::lock_guard lock(mutex_);
  ++released_;
  changed_.notify_all();
}

void FaultyFileSystem::AwaitHeld() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return held_ > 0; });
}

FaultyFileSystem::Fault FaultyFileSystem::Check(const std::string& operation,
                                                const std::string& path) {
  std::unique_lock lock(mutex_);
  Fault fault;
  for (size_t i = 0; i < rules_.size(); ++i) {
    FaultRule& rule = rules_[i];
    if (rule.operation != "*" && rule.operation != operation) continue;
    if (fnmatch(rule.pattern.c_str(), path.c_str(), 0) != 0) continue;
    ++rule.seen;
    if (rule.seen < rule.first || rule.seen > rule.last) continue;
    switch (rule.action) {
      case FaultRule::Action::kEio:
        fault.status = absl::DataLossError(absl::StrCat(
            "cannot ", operation, " ", path, ": Input/output error (a fault that was planned)"));
        return fault;
      case FaultRule::Action::kEnospc:
        fault.status = absl::ResourceExhaustedError(
            absl::StrCat("cannot ", operation, " ", path,
                         ": No space left on device (a fault that was planned)"));
        return fault;
      case FaultRule::Action::kShort:
        fault.is_short = true;
        fault.short_bytes = rule.short_bytes;
        fault.status = absl::DataLossError(
            absl::StrCat("cannot ", operation, " more than ", rule.short_bytes, " bytes of ", path,
                         ": Input/output error (a fault that was planned)"));
        return fault;
      case FaultRule::Action::kKill:
        kill(getpid(), SIGKILL);
        break;
      case FaultRule::Action::kWait: {
        const uint64_t released = released_;
        ++held_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return released_ != released; });
        --held_;
        return fault;
      }
    }
  }
  return fault;
}

absl::StatusOr<std::unique_ptr<File>> FaultyFileSystem::Open(const std::string& path,
                                                             const OpenOptions& options) {
  const bool creates =
      options.mode == OpenMode::kCreate || options.mode == OpenMode::kCreateOrEmpty;
  const Fault fault = Check(creates ? "create" : "open", path);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  if (unsynced_ && creates) {
    struct stat info {};
    if (lstat(path.c_str(), &info) != 0) {
      LogCreation(path);
    } else if (options.mode == OpenMode::kCreateOrEmpty) {
      LogContent(path, 0, std::numeric_limits<uint64_t>::max());
    }
  }
  absl::StatusOr<std::unique_ptr<File>> file = base_->Open(path, options);
  if (!file.ok()) return file.status();
  return std::make_unique<FaultyFile>(this, *std::move(file));
}

absl::Status FaultyFileSystem::MakeDirectory(const std::string& path) {
  const Fault fault = Check("mkdir", path);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  struct stat info {};
  if (unsynced_ && lstat(path.c_str(), &info) != 0) LogCreation(path);
  return base_->MakeDirectory(path);
}

absl::Status FaultyFileSystem::SyncDirectory(const std::string& path) {
  const Fault fault = Check("syncdir", path);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  if (absl::Status status = base_->SyncDirectory(path); !status.ok()) return status;
  if (unsynced_) ForgetNames(path);
  return absl::OkStatus();
}

absl::Status FaultyFileSystem::Rename(const std::string& from, const std::string& to) {
  const Fault fault = Check("rename", to);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  if (unsynced_) LogRename(from, to);
  return base_->Rename(from, to);
}

absl::Status FaultyFileSystem::Remove(const std::string& path) {
  const Fault fault = Check("remove", path);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  if (unsynced_) LogRemoval(path);
  return base_->Remove(path);
}

absl::Status FaultyFileSystem::RemoveDirectory(const std::string& path) {
  const Fault fault = Check("remove", path);
  if (!fault.status.ok()) return fault.status;
  const std::lock_guard lock(log_mutex_);
  if (unsynced_) {
    // What was removed in it cannot come back once the directory is gone.
    ForgetNames(path);
    absl::StatusOr<std::vector<std::string>> names = base_->List(path);
    for (size_t i = 0; names.ok() && i < names->size(); ++i) {
      if (IsUnsyncedLog((*names)[i])) (void)base_->Remove(JoinPath(path, (*names)[i]));
    }
    LogRemoval(path);
  }
  return base_->RemoveDirectory(path);
}

absl::StatusOr<std::vector<std::string>> FaultyFileSystem::List(const std::string& path) {
  const Fault fault = Check("list", path);
  if (!fault.status.ok()) return fault.status;
  absl::StatusOr<std::vector<std::string>> names = base_->List(path);
  if (names.ok()) std::erase_if(*names, IsUnsyncedLog);
  return names;
}

absl::StatusOr<FileInfo> FaultyFileSystem::Stat(const std::string& path) {
  const Fault fault = Check("stat", path);
  if (!fault.status.ok()) return fault.status;
  return base_->Stat(path);
}

absl::StatusOr<uint64_t> FaultyFileSystem::FreeBytes(const std::string& path) {
  return base_->FreeBytes(path);
}

}  // namespace shardd::env
