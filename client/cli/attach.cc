#include "client/cli/attach.h"

#include <sys/socket.h>
#include <sys/time.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/contract/attach.h"
#include "proto/contract/segments.h"

namespace shardd::cli {

namespace {

// A daemon that takes the connection answers at once; a longer silence is a fault.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(10);
constexpr absl::Duration kRetryInterval = absl::Milliseconds(20);

absl::StatusOr<contract::UniqueFd> Connect(const std::string& path, absl::Duration timeout) {
  absl::Time deadline = absl::Now() + timeout;
  while (true) {
    absl::StatusOr<contract::UniqueFd> fd = contract::ConnectUnix(path, SOCK_SEQPACKET);
    if (fd.ok()) return fd;
    if (absl::IsInvalidArgument(fd.status())) return fd;
    if (absl::IsPermissionDenied(fd.status())) {
      return absl::PermissionDeniedError(
          absl::StrCat(fd.status().message(), ": join the socket's group, or use your own daemon"));
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("no daemon answers: ", fd.status().message(),
                       ": start shardd, or name its socket with --address or SHARDD_ADDRESS"));
    }
    absl::SleepFor(kRetryInterval);
  }
}

}  // namespace

absl::StatusOr<Attachment> Attach(const std::string& socket, absl::Duration timeout) {
  std::string path = socket + contract::kAttachSuffix;
  absl::StatusOr<contract::UniqueFd> fd = Connect(path, timeout);
  if (!fd.ok()) return fd.status();
  timeval answer_timeout = absl::ToTimeval(kAnswerTimeout);
  setsockopt(fd->get(), SOL_SOCKET, SO_RCVTIMEO, &answer_timeout, sizeof(answer_timeout));

  contract::AttachMessage message;
  message.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
  message.protocol_version = contract::kProtocolVersion;
  absl::Status sent =
      contract::SendMessage(fd->get(), std::as_bytes(std::span(&message, 1)), {}, 0);
  if (!sent.ok()) return sent;
  absl::StatusOr<std::vector<contract::UniqueFd>> received = contract::ReceiveMessage(
      fd->get(), std::as_writable_bytes(std::span(&message, 1)), /*max_fds=*/0);
  if (!received.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "the daemon at ", path, " did not answer hello: ", received.status().message()));
  }
  std::string text(message.text, strnlen(message.text, sizeof(message.text)));
  if (message.magic != contract::kAttachMagic) {
    return absl::FailedPreconditionError(
        absl::StrCat("what listens at ", path, " is no shardd: its answer has another magic"));
  }
  if (message.kind != static_cast<uint16_t>(contract::AttachKind::kHello)) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon at ", path, " refused: ", text));
  }
  return Attachment{
      std::move(*fd),
      std::string(reinterpret_cast<const char*>(message.token), sizeof(message.token)),
      std::move(text)};
}

}  // namespace shardd::cli
