#include "client/attach_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/contract/attach.h"
#include "proto/contract/segments.h"

namespace shardd {

namespace {

using contract::AttachKind;
using contract::AttachMessage;

// How often a socket that is not there yet is looked for.
constexpr absl::Duration kRetry = absl::Milliseconds(20);
// A daemon answers at once; this is for one that is stopped or overloaded.
constexpr absl::Duration kAnswer = absl::Seconds(30);

std::string Text(const AttachMessage& message) {
  return std::string(message.text, strnlen(message.text, sizeof(message.text)));
}

std::span<const std::byte> Bytes(const AttachMessage& message) {
  return std::as_bytes(std::span(&message, 1));
}

struct Received {
  AttachMessage message;
  std::vector<contract::UniqueFd> fds;
};

// One answer of the daemon, of `kind`; kError becomes `refused` with the daemon's words.
absl::StatusOr<Received> Receive(int socket, AttachKind kind, size_t fds, absl::Time deadline,
                                 absl::StatusCode refused) {
  pollfd poller{socket, POLLIN, 0};
  int ready;
  do {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    ready = poll(&poller, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return absl::DeadlineExceededError(
        "the daemon does not answer on its attach socket; see whether it is stopped");
  }
  Received received;
  auto buffer = std::as_writable_bytes(std::span(&received.message, 1));
  absl::StatusOr<std::vector<contract::UniqueFd>> got =
      contract::ReceiveMessage(socket, buffer, fds);
  if (!got.ok()) {
    if (absl::IsOutOfRange(got.status())) {
      return absl::UnavailableError("the daemon closed the attach socket; see its log");
    }
    return got.status();
  }
  const AttachMessage& message = received.message;
  if (message.magic != contract::kAttachMagic) {
    return absl::FailedPreconditionError("the attach socket is not that of a shardd daemon");
  }
  if (message.kind == static_cast<uint16_t>(AttachKind::kError)) {
    return absl::Status(refused, Text(message));
  }
  if (message.kind != static_cast<uint16_t>(kind) || got->size() != fds) {
    return absl::InternalError(
        absl::StrCat("the daemon answered with message ", message.kind, " and ", got->size(),
                     " descriptors where message ", static_cast<int>(kind), " and ", fds,
                     " are due; daemon and client are of different versions"));
  }
  received.fds = *std::move(got);
  return received;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachConnection>> AttachConnection::Connect(
    const std::string& grpc_path, absl::Time deadline) {
  const std::string path = absl::StrCat(grpc_path, contract::kAttachSuffix);
  std::unique_ptr<AttachConnection> connection(new AttachConnection());
  while (true) {
    absl::StatusOr<contract::UniqueFd> socket = contract::ConnectUnix(path, SOCK_SEQPACKET);
    absl::Status status = socket.status();
    if (status.ok()) {
      connection->socket_ = *std::move(socket);
      status = connection->SayHello(std::max(deadline, absl::Now() + kAnswer));
      if (status.ok()) return connection;
    }
    // Not there yet, nobody listening yet, a full backlog, or one that died before it answered:
    // wait. Else it is an error.
    const bool transient = absl::IsNotFound(status) || absl::IsUnavailable(status);
    if (!transient) return status;
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("no daemon answers at ", grpc_path, ": ", status.message(),
                       "; start shardd there, or set SHARDD_ADDRESS to where it is"));
    }
    absl::SleepFor(std::min(kRetry, deadline - absl::Now()));
  }
}

absl::Status AttachConnection::SayHello(absl::Time deadline) {
  AttachMessage hello;
  hello.kind = static_cast<uint16_t>(AttachKind::kHello);
  hello.protocol_version = contract::kProtocolVersion;
  absl::Status status = contract::SendMessage(socket_.get(), Bytes(hello), {});
  if (!status.ok()) return status;
  absl::StatusOr<Received> answer = Receive(socket_.get(), AttachKind::kHello, 0, deadline,
                                            absl::StatusCode::kFailedPrecondition);
  if (!answer.ok()) return answer.status();
  const AttachMessage& message = answer->message;
  token_.assign(reinterpret_cast<const char*>(message.token), sizeof(message.token));
  session_ = message.session;
  version_ = Text(message);
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
    daemon_pid_ = peer.pid;
  }
  return absl::OkStatus();
}

absl::StatusOr<AttachConnection::Segments> AttachConnection::ExchangeSegments(int ring_fd) {
  AttachMessage message;
  message.kind = static_cast<uint16_t>(AttachKind::kSegments);
  message.protocol_version = contract::kProtocolVersion;
  std::memcpy(message.token, token_.data(), std::min(token_.size(), sizeof(message.token)));
  message.session = session_;
  const int fds[] = {ring_fd};
  absl::Status status = contract::SendMessage(socket_.get(), Bytes(message), fds);
  if (!status.ok()) return status;
  absl::StatusOr<Received> answer =
      Receive(socket_.get(), AttachKind::kSegments, 2, absl::Now() + kAnswer,
              absl::StatusCode::kInvalidArgument);
  if (!answer.ok()) return answer.status();
  return Segments{std::move(answer->fds[0]), std::move(answer->fds[1])};
}

void AttachConnection::RingDoorbell() const {
  AttachMessage message;
  message.kind = static_cast<uint16_t>(AttachKind::kDoorbell);
  message.protocol_version = contract::kProtocolVersion;
  contract::SendMessage(socket_.get(), Bytes(message), {}, MSG_DONTWAIT).IgnoreError();
}

void AttachConnection::HangUp() const { shutdown(socket_.get(), SHUT_RDWR); }

bool AttachConnection::Gone(std::string* why) const {
  AttachMessage message;
  const ssize_t got =
      recv(socket_.get(), &message, sizeof(message), MSG_PEEK | MSG_DONTWAIT | MSG_NOSIGNAL);
  if (got < 0) return errno != EAGAIN && errno != EINTR;
  if (got == static_cast<ssize_t>(sizeof(message)) &&
      message.kind == static_cast<uint16_t>(AttachKind::kError) && why != nullptr) {
    *why = Text(message);
  }
  // After the handshake the daemon says nothing but farewell.
  return true;
}

}  // namespace shardd
