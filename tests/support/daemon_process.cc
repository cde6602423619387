#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <sstream>

#include "absl/time/clock.h"
#include "proto/contract/attach.h"
#include "proto/contract/segments.h"

namespace shardd::test {

namespace {

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "test set-up: %s\n", why.c_str());
  std::abort();
}

// Waits until `fd` (inotify on the log) has news, so that nobody polls the clock.
void AwaitChange(int fd, int timeout_ms) {
  pollfd p{fd, POLLIN, 0};
  if (poll(&p, 1, timeout_ms) == 1) {
    char buffer[4096];
    [[maybe_unused]] const ssize_t n = read(fd, buffer, sizeof(buffer));
  }
}

}  // namespace

std::string Runfile(const std::string& path) {
  const char* dir = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (dir == nullptr || workspace == nullptr) Die("run tests with bazel test");
  return std::string(dir) + "/" + workspace + "/" + path;
}

DaemonProcess::DaemonProcess(Options options) {
  state_directory_ = options.state_directory;
  if (state_directory_.empty()) {
    own_state_ = std::make_unique<TempDir>("/dev/shm");
    state_directory_ = own_state_->path() + "/state";
  }
  socket_ = options.socket.empty() ? dir_.path() + "/run/d.sock" : options.socket;
  log_path_ = dir_.path() + "/log";
  chmod(dir_.path().c_str(), 0755);
  const std::string binary = Runfile("server/shardd");
  std::vector<std::string> arguments = {
      binary, "--listen.socket=" + socket_, "--store.directory=" + state_directory_,
      "--spill.directory=" + dir_.path() + "/spill", "--failpoints=true"};
  arguments.insert(arguments.end(), options.flags.begin(), options.flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    umask(options.umask);
    const int log = open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    dup2(log, 1);
    dup2(log, 2);
    if (options.before_exec != nullptr) options.before_exec();
    execv(binary.c_str(), argv.data());
    _exit(127);
  }
  if (!AwaitLog("ready at")) Die("the daemon did not start: " + Log());

  absl::StatusOr<contract::UniqueFd> socket =
      contract::ConnectUnix(socket_ + contract::kAttachSuffix, SOCK_SEQPACKET);
  if (!socket.ok()) Die(socket.status().ToString());
  attach_ = *std::move(socket);
  contract::AttachMessage hello;
  hello.kind = static_cast<uint16_t>(contract::AttachKind::kHello);
  hello.protocol_version = contract::kProtocolVersion;
  if (!contract::SendMessage(attach_.get(), std::as_bytes(std::span(&hello, 1)), {}).ok() ||
      !contract::ReceiveMessage(attach_.get(), std::as_writable_bytes(std::span(&hello, 1)), 0)
           .ok()) {
    Die("the daemon did not answer hello");
  }
  token_.assign(reinterpret_cast<const char*>(hello.token), sizeof(hello.token));
  admin_ = v1::Admin::NewStub(
      grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials()));
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) {
    const int status = Stop();
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      Die("the daemon ended badly, status " + std::to_string(status) + ": " + Log());
    }
  }
}

std::string DaemonProcess::Log() const {
  std::ifstream file(log_path_);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool DaemonProcess::AwaitLog(const std::string& text) const {
  const contract::UniqueFd watch(inotify_init1(IN_CLOEXEC));
  inotify_add_watch(watch.get(), dir_.path().c_str(), IN_CREATE | IN_MODIFY);
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (Log().find(text) == std::string::npos) {
    if (absl::Now() > deadline || !Alive()) return Log().find(text) != std::string::npos;
    AwaitChange(watch.get(), 1000);
  }
  return true;
}

bool DaemonProcess::Alive() const {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

int DaemonProcess::Stop() {
  kill(pid_, SIGTERM);
  return AwaitDeath();
}

int DaemonProcess::AwaitDeath() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return status;
}

v1::ServerInfoReply DaemonProcess::Info() {
  grpc::ClientContext context;
  v1::ServerInfoRequest request;
  request.set_token(token_);
  v1::ServerInfoReply reply;
  const grpc::Status status = admin_->ServerInfo(&context, request, &reply);
  if (!status.ok()) Die(status.error_message());
  return reply;
}

bool DaemonProcess::AnswersWithin(double seconds) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6)));
  v1::ServerInfoRequest request;
  request.set_token(token_);
  v1::ServerInfoReply reply;
  return admin_->ServerInfo(&context, request, &reply).ok();
}

v1::JobStatus DaemonProcess::Job(const std::string& name) {
  grpc::ClientContext context;
  v1::ListJobsRequest request;
  request.set_token(token_);
  request.set_name(name);
  v1::ListJobsReply reply;
  const grpc::Status status = admin_->ListJobs(&context, request, &reply);
  if (!status.ok() || reply.jobs_size() != 1) Die("no job " + name + ": " + status.error_message());
  return reply.jobs(0);
}

bool DaemonProcess::HasJob(const std::string& name) {
  grpc::ClientContext context;
  v1::ListJobsRequest request;
  request.set_token(token_);
  request.set_name(name);
  v1::ListJobsReply reply;
  return admin_->ListJobs(&context, request, &reply).ok();
}

void DaemonProcess::ArmFailpoint(const std::string& name, const std::string& action,
                                 uint32_t skip) {
  grpc::ClientContext context;
  v1::ArmFailpointRequest request;
  request.set_token(token_);
  request.set_name(name);
  request.set_action(action);
  request.set_skip(skip);
  v1::ArmFailpointReply reply;
  const grpc::Status status = admin_->ArmFailpoint(&context, request, &reply);
  if (!status.ok()) Die(status.error_message());
}

void DaemonProcess::AwaitFailpoint(const std::string& name) {
  grpc::ClientContext context;
  v1::WaitFailpointRequest request;
  request.set_token(token_);
  request.set_name(name);
  request.set_deadline_seconds(60);
  v1::WaitFailpointReply reply;
  const grpc::Status status = admin_->WaitFailpoint(&context, request, &reply);
  if (!status.ok()) Die(status.error_message() + "\n" + Log());
}

void DaemonProcess::ReleaseFailpoint(const std::string& name) {
  grpc::ClientContext context;
  v1::ReleaseFailpointRequest request;
  request.set_token(token_);
  request.set_name(name);
  v1::ReleaseFailpointReply reply;
  const grpc::Status status = admin_->ReleaseFailpoint(&context, request, &reply);
  if (!status.ok()) Die(status.error_message());
}

v1::DrainReply DaemonProcess::Drain(double deadline_seconds) {
  grpc::ClientContext context;
  v1::DrainRequest request;
  request.set_token(token_);
  request.set_deadline_seconds(deadline_seconds);
  v1::DrainReply reply;
  const grpc::Status status = admin_->Drain(&context, request, &reply);
  if (!status.ok()) Die(status.error_message());
  return reply;
}

grpc::Status DaemonProcess::DeleteJob(const std::string& name, bool force) {
  grpc::ClientContext context;
  v1::DeleteJobRequest request;
  request.set_token(token_);
  request.set_job(name);
  request.set_force(force);
  v1::DeleteJobReply reply;
  return admin_->DeleteJob(&context, request, &reply);
}

grpc::Status DaemonProcess::HandOver(const std::string& job, const std::string& to) {
  grpc::ClientContext context;
  v1::HandOverRequest request;
  request.set_token(token_);
  request.set_job(job);
  request.set_to(to);
  v1::HandOverReply reply;
  return admin_->HandOver(&context, request, &reply);
}

}  // namespace shardd::test
