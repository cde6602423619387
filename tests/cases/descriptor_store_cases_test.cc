// Segments that the service manager keeps: a daemon whose state directory is lost goes on with
// the descriptors that it had put into systemd's store. The test plays the manager.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"

namespace shardd::test {
namespace {

using Processes = std::vector<std::unique_ptr<RankProcess>>;

constexpr uint32_t kWorld = 2;

// A NOTIFY_SOCKET, and the descriptors that came over it.
class Manager {
 public:
  Manager() : path_(directory_.path() + "/notify") {
    socket_ = contract::UniqueFd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
  }
  ~Manager() { unsetenv("NOTIFY_SOCKET"); }

  // Reads what has come so far.
  void Read() {
    while (true) {
      char text[4096];
      iovec part{text, sizeof(text) - 1};
      alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))];
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      const ssize_t n = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      if (n < 0) return;
      const std::string said(text, static_cast<size_t>(n));
      const size_t at = said.find("FDNAME=");
      if (at == std::string::npos) continue;
      const std::string name = said.substr(at + 7, said.find('\n', at) - at - 7);
      if (said.find("FDSTOREREMOVE=1") != std::string::npos) {
        kept.erase(name);
        continue;
      }
      const cmsghdr* header = CMSG_FIRSTHDR(&message);
      if (header == nullptr) continue;
      int fd;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
      kept[name] = contract::UniqueFd(fd);
    }
  }

  std::map<std::string, contract::UniqueFd> kept;

 private:
  TempDir directory_;
  std::string path_;
  contract::UniqueFd socket_;
};

// For the child between fork and exec: what systemd does.
std::vector<int>* handed_over = nullptr;
std::string* handed_names = nullptr;

void HandOver() {
  // Out of the way first: a target may be another one's source.
  std::vector<int> high;
  for (int fd : *handed_over) high.push_back(fcntl(fd, F_DUPFD, 100));
  for (size_t i = 0; i < high.size(); ++i) {
    dup2(high[i], 3 + static_cast<int>(i));
    close(high[i]);
  }
  setenv("LISTEN_PID", std::to_string(getpid()).c_str(), 1);
  setenv("LISTEN_FDS", std::to_string(high.size()).c_str(), 1);
  setenv("LISTEN_FDNAMES", handed_names->c_str(), 1);
}

std::unique_ptr<DaemonProcess> StartDaemon(const std::string& directory, const Manager& manager) {
  std::vector<int> fds;
  std::string names;
  for (const auto& [name, fd] : manager.kept) {
    fds.push_back(fd.get());
    names += (names.empty() ? "" : ":") + name;
  }
  handed_over = &fds;
  handed_names = &names;
  DaemonProcess::Options options;
  options.state_directory = directory;
  if (!fds.empty()) options.before_exec = HandOver;
  return std::make_unique<DaemonProcess>(options);
}

Processes StartRanks(const DaemonProcess& daemon, const std::string& steps) {
  Processes ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(
        daemon.socket(), r, kWorld, std::vector<std::string>{"--job=toy", "--steps=" + steps}));
  }
  return ranks;
}

std::string Finish(Processes* ranks) {
  std::string digest;
  for (auto& rank : *ranks) {
    digest = rank->AwaitLine("done");
    EXPECT_NE(digest, "");
    EXPECT_EQ(rank->Wait(), 0);
  }
  return digest;
}

class DescriptorStoreCases : public testing::Test {
 protected:
  std::string Undisturbed() {
    DaemonProcess daemon;
    Processes ranks = StartRanks(daemon, "6");
    return Finish(&ranks);
  }
  // A daemon takes three steps and dies.
  void ThreeSteps(Manager* manager) {
    auto daemon = StartDaemon(directory_, *manager);
    Processes ranks = StartRanks(*daemon, "3");
    Finish(&ranks);
    manager->Read();
    kill(daemon->pid(), SIGKILL);
    daemon->AwaitDeath();
  }

  TempDir state_{"/dev/shm"};
  std::string directory_ = state_.path() + "/state";
};

TEST_F(DescriptorStoreCases, TheFilesAreLostAndTheJobGoesOn) {
  const std::string expected = Undisturbed();
  Manager manager;
  ThreeSteps(&manager);
  EXPECT_EQ(manager.kept.size(), 4u);
  std::filesystem::remove_all(directory_);

  auto daemon = StartDaemon(directory_, manager);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 3u) << daemon->Log();
  Processes ranks = StartRanks(*daemon, "6");
  EXPECT_EQ(Finish(&ranks), expected);
  // Again, and from the same descriptors: the files are still not there.
  kill(daemon->pid(), SIGKILL);
  daemon->AwaitDeath();
  daemon = StartDaemon(directory_, manager);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 6u);
  // Deleting it gives the memory back.
  EXPECT_TRUE(daemon->DeleteJob("toy", false).ok());
  manager.Read();
  EXPECT_EQ(manager.kept.size(), 0u);
}

TEST_F(DescriptorStoreCases, FilesThatAreThereAreTaken) {
  Manager manager;
  ThreeSteps(&manager);
  auto daemon = StartDaemon(directory_, manager);
  EXPECT_EQ(daemon->Info().adopted_jobs(), 1u);
  EXPECT_EQ(daemon->Job("toy").committed_step(), 3u);
  EXPECT_EQ(daemon->Log().find("its files are gone"), std::string::npos);
}

TEST_F(DescriptorStoreCases, AnIncompleteSetIsNamedAndLeft) {
  Manager manager;
  ThreeSteps(&manager);
  std::filesystem::remove_all(directory_);
  manager.kept.erase("shardd/toy/state");
  auto daemon = StartDaemon(directory_, manager);
  EXPECT_NE(daemon->Log().find("without its segment 'state'"), std::string::npos) << daemon->Log();
  EXPECT_FALSE(daemon->HasJob("toy"));
}

TEST_F(DescriptorStoreCases, OtherFilesUnderTheSameNameAreLeftUntouched) {
  Manager old;
  ThreeSteps(&old);
  std::filesystem::remove_all(directory_);
  Manager fresh;
  ThreeSteps(&fresh);  // another job of that name
  auto daemon = StartDaemon(directory_, old);
  EXPECT_NE(daemon->Log().find("left untouched"), std::string::npos) << daemon->Log();
  EXPECT_EQ(daemon->Job("toy").committed_step(), 3u);
}

}  // namespace
}  // namespace shardd::test
