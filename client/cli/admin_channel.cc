#include "client/cli/admin_channel.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd::cli {

absl::StatusOr<std::unique_ptr<AdminChannel>> AdminChannel::Connect(const std::string& socket,
                                                                    absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<AttachConnection>> attachment =
      AttachConnection::Connect(socket, absl::Now() + timeout);
  if (!attachment.ok()) return attachment.status();
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials());
  return absl::WrapUnique(new AdminChannel(std::move(*attachment), v1::Admin::NewStub(channel)));
}

absl::Status AdminChannel::ToAbsl(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

bool AdminChannel::AwaitEnd(absl::Duration timeout) const {
  if (attachment_->daemon_pid() == 0) return false;
  const contract::UniqueFd process(
      static_cast<int>(syscall(SYS_pidfd_open, attachment_->daemon_pid(), 0)));
  if (!process) return errno == ESRCH;
  pollfd end{process.get(), POLLIN, 0};
  return poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) == 1;
}

}  // namespace shardd::cli
