// Sessions by token.
#ifndef SHARDD_SERVER_CONTROL_SESSION_REGISTRY_H_
#define SHARDD_SERVER_CONTROL_SESSION_REGISTRY_H_

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "server/step/session.h"

namespace shardd::control {

// Thread-safe.
class SessionRegistry {
 public:
  explicit SessionRegistry(size_t max_sessions) : max_sessions_(max_sessions) {}

  // A new session with a random token. ResourceExhausted at limits.sessions.
  absl::StatusOr<std::shared_ptr<step::Session>> Create(uid_t uid, pid_t pid,
                                                        contract::UniqueFd socket,
                                                        contract::UniqueFd pidfd);
  // Unauthenticated when there is none with this token.
  absl::StatusOr<std::shared_ptr<step::Session>> Find(const std::string& token) const;
  void Remove(const step::Session& session);
  size_t size() const;

 private:
  const size_t max_sessions_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<step::Session>> sessions_;
};

}  // namespace shardd::control

#endif  // SHARDD_SERVER_CONTROL_SESSION_REGISTRY_H_
