#include "server/control/session_registry.h"

#include <sys/random.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/contract/attach.h"

namespace shardd::control {

absl::StatusOr<std::shared_ptr<step::Session>> SessionRegistry::Create(uid_t uid, pid_t pid,
                                                                       contract::UniqueFd socket,
                                                                       contract::UniqueFd pidfd) {
  auto session = std::make_shared<step::Session>();
  session->token.resize(contract::kTokenBytes);
  if (getrandom(session->token.data(), session->token.size(), 0) !=
          static_cast<ssize_t>(session->token.size()) ||
      getrandom(&session->nonce, sizeof(session->nonce), 0) != sizeof(session->nonce)) {
    return contract::ErrnoStatus(errno, "cannot make a token");
  }
  // Drawn, not counted: the daemons of a job know each other's sessions by it, and must not take
  // one for another daemon's, or for one that a daemon had before it was started again.
  session->nonce = session->nonce >> 2 | 1;
  session->uid = uid;
  session->pid = pid;
  session->socket = std::move(socket);
  session->pidfd = std::move(pidfd);
  std::lock_guard lock(mutex_);
  if (sessions_.size() >= max_sessions_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the daemon has ", sessions_.size(), " sessions (limits.sessions); end some"));
  }
  sessions_[session->token] = session;
  return session;
}

absl::StatusOr<std::shared_ptr<step::Session>> SessionRegistry::Find(
    const std::string& token) const {
  std::lock_guard lock(mutex_);
  const auto it = sessions_.find(token);
  if (it == sessions_.end()) {
    return absl::UnauthenticatedError(
        "this call carries no token of a living session; attach to the daemon's socket first");
  }
  return it->second;
}

void SessionRegistry::Remove(const step::Session& session) {
  std::shared_ptr<step::Session> removed;  // closed without the lock
  std::lock_guard lock(mutex_);
  const auto it = sessions_.find(session.token);
  if (it == sessions_.end()) return;
  removed = std::move(it->second);
  sessions_.erase(it);
}

size_t SessionRegistry::size() const {
  std::lock_guard lock(mutex_);
  return sessions_.size();
}

}  // namespace shardd::control
