// Two daemons in network namespaces of their own, with a cable between them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "tests/support/cluster.h"

namespace shardd::test {
namespace {

std::string entered;  // the namespace that the next daemon's process enters

void Enter() {
  const int fd = open(("/run/netns/" + entered).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) _exit(126);
}

bool Shell(const std::string& command) { return std::system((command + " >&2").c_str()) == 0; }

bool Write(const char* path, const std::string& text) {
  const int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return written;
}

// Makes this process, which has one thread yet, root of user, network and mount namespaces of its
// own, where `ip netns` has a /run to work in. False: that is refused too.
bool BecomeRootOfOwn() {
  const std::string uid = std::to_string(geteuid()), gid = std::to_string(getegid());
  return unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS) == 0 &&
         Write("/proc/self/setgroups", "deny") && Write("/proc/self/uid_map", "0 " + uid + " 1") &&
         Write("/proc/self/gid_map", "0 " + gid + " 1") &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/run", "tmpfs", 0, nullptr) == 0;
}

// 10.77.0.1 and 10.77.0.2, joined by a virtual cable; gone with the object.
class Namespaces {
 public:
  Namespaces() {
    if (!Shell("ip netns add shardd-probe && ip netns del shardd-probe") && !BecomeRootOfOwn()) {
      return;
    }
    const std::string pid = std::to_string(getpid());
    for (int i : {0, 1}) names_[i] = "shardd-" + pid + "-" + std::to_string(i);
    made_ = Shell("ip netns add " + names_[0]) && Shell("ip netns add " + names_[1]) &&
            Shell("ip -n " + names_[0] + " link add cable type veth peer name cable netns " +
                  names_[1]);
    for (int i : {0, 1}) {
      const std::string ip = "ip -n " + names_[i] + " ";
      made_ = made_ && Shell(ip + "addr add 10.77.0." + std::to_string(i + 1) + "/24 dev cable") &&
              Shell(ip + "link set lo up") && Shell(ip + "link set cable up");
    }
  }
  ~Namespaces() {
    for (const std::string& name : names_) Shell("ip netns del " + name + " 2>/dev/null");
  }
  bool made() const { return made_; }
  const std::string& name(int i) const { return names_[i]; }
  void Cable(bool up) const {
    EXPECT_TRUE(Shell("ip -n " + names_[0] + " link set cable " + (up ? "up" : "down")));
  }

 private:
  std::string names_[2];
  bool made_ = false;
};

TEST(PeerNamespaces, TwoHostsAndACableThatIsPulled) {
  const Namespaces hosts;
  if (!hosts.made()) {
    std::fprintf(stderr,
                 "\n*** NETWORK NAMESPACES ARE NOT ALLOWED HERE: THIS CASE DID NOT RUN ***\n");
    GTEST_SKIP() << "ip netns needs root, or user namespaces";
  }
  const TempDir certificates("/tmp");
  ASSERT_TRUE(Shell(Runfile("deploy/certs") + " " + certificates.path() + " a b"));
  std::unique_ptr<DaemonProcess> daemons[2];
  for (int i : {0, 1}) {
    const std::string self = Cluster::Name(static_cast<size_t>(i));
    const std::string other = Cluster::Name(static_cast<size_t>(1 - i));
    DaemonProcess::Options options;
    options.flags = {"--peer.name=" + self,
                     "--peer.listen=10.77.0." + std::to_string(i + 1) + ":7700",
                     "--peer.peers[0].name=" + other,
                     "--peer.peers[0].address=10.77.0." + std::to_string(2 - i) + ":7700",
                     "--peer.ca=" + certificates.path() + "/ca.pem",
                     "--peer.certificate=" + certificates.path() + "/" + self + ".pem",
                     "--peer.key=" + certificates.path() + "/" + self + ".key"};
    options.before_exec = &Enter;
    entered = hosts.name(i);
    daemons[i] = std::make_unique<DaemonProcess>(options);
  }
  DaemonProcess alone;
  std::vector<std::unique_ptr<RankProcess>> ranks, one;
  one.push_back(
      std::make_unique<RankProcess>(alone.socket(), 0, 1, std::vector<std::string>{"--job=toy"}));
  const std::string expected = FinishRanks(&one);

  daemons[1]->ArmFailpoint("peer.prepared", "wait", 2);
  for (uint32_t r = 0; r < 2; ++r) {
    ranks.push_back(std::make_unique<RankProcess>(daemons[r]->socket(), r, 2,
                                                  std::vector<std::string>{"--job=toy"}));
  }
  daemons[1]->AwaitFailpoint("peer.prepared");
  hosts.Cable(false);
  daemons[1]->ReleaseFailpoint("peer.prepared");
  while (daemons[0]->Job("toy").waits_for().find("daemon b (which is not reached") ==
         std::string::npos) {
    ASSERT_TRUE(daemons[0]->Alive());
  }
  EXPECT_EQ(daemons[0]->Job("toy").committed_step(), 2u);
  EXPECT_EQ(daemons[1]->Job("toy").committed_step(), 2u);
  hosts.Cable(true);
  EXPECT_EQ(FinishRanks(&ranks), expected);
  EXPECT_EQ(daemons[0]->Job("toy").committed_step(), 5u);
  EXPECT_EQ(daemons[0]->Job("toy").recomputed_steps(), 0u);
}

}  // namespace
}  // namespace shardd::test
