// Memory, limits and permissions.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <future>

#include "tests/support/daemon_process.h"
#include "tests/support/rank_process.h"
#include "tests/support/ranks.h"
#include "tests/support/raw_session.h"

namespace shardd::test {
namespace {

// A tmpfs of the test's own, unmounted at the end.
class Tmpfs {
 public:
  explicit Tmpfs(uint64_t bytes) {
    const std::string options = "mode=0700,size=" + std::to_string(bytes);
    mounted_ = mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~Tmpfs() {
    if (mounted_) umount2(dir_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  std::string state() const { return dir_.path() + "/state"; }
  uint64_t Free() const {
    struct statfs fs {};
    statfs(dir_.path().c_str(), &fs);
    return uint64_t{fs.f_bavail} * static_cast<uint64_t>(fs.f_bsize);
  }

 private:
  TempDir dir_;
  bool mounted_ = false;
};

ParameterSpec Param(uint64_t elements) {
  ParameterSpec spec;
  spec.name = "w";
  spec.shape = {static_cast<int64_t>(elements)};
  return spec;
}

constexpr uint64_t kElements = 1'000'000;

// Runs tests/support/raw_open; the status as waitpid gives it.
int RawOpen(const DaemonProcess& daemon, const std::string& job, uint64_t elements, uid_t uid,
            gid_t gid, const std::string& how) {
  std::vector<std::string> words = {Runfile("tests/support/raw_open"),
                                    daemon.socket(),
                                    job,
                                    std::to_string(elements),
                                    std::to_string(uid),
                                    std::to_string(gid),
                                    how};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = -1;
  if (posix_spawn(&child, argv[0], nullptr, nullptr, argv.data(), environ) != 0) return -1;
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// What a job of kElements takes in a state directory.
uint64_t JobBytes() {
  DaemonProcess daemon;
  auto session = OpenRank(daemon.socket(), 0, 1, SmallJob("size", 1), {Param(kElements)});
  const v1::JobStatus job = daemon.Job("size");
  EXPECT_TRUE(session->Close().ok());
  return job.state_bytes() + job.weights_bytes() + job.reduced_bytes();
}

TEST(ResourceCases, StateDirectoryTooSmallByOneMiB) {
  const uint64_t need = JobBytes();
  const Tmpfs tmpfs(need - (1 << 20));
  ASSERT_TRUE(tmpfs.mounted());
  DaemonProcess::Options options;
  options.state_directory = tmpfs.state();
  options.flags = {"--memory.budget_bytes=1000000000"};
  DaemonProcess daemon(options);
  const uint64_t before = tmpfs.Free();
  const auto session =
      Session::Open(RankOptions(daemon.socket(), 0, 1), SmallJob("big", 1), {Param(kElements)});
  ASSERT_TRUE(absl::IsResourceExhausted(session.status())) << session.status();
  const std::string message(session.status().message());
  EXPECT_NE(message.find("needs " + std::to_string(need)), std::string::npos) << message;
  EXPECT_NE(message.find("has " + std::to_string(before) + " free"), std::string::npos) << message;
  EXPECT_NE(message.find("enlarge its tmpfs"), std::string::npos) << message;
  EXPECT_EQ(tmpfs.Free(), before);  // nothing half-made
  EXPECT_FALSE(daemon.HasJob("big"));
  EXPECT_EQ(daemon.Info().planned_bytes(), 0u);
}

TEST(ResourceCases, BudgetIsHard) {
  const uint64_t need = JobBytes();
  DaemonProcess::Options options;
  options.flags = {"--memory.budget_bytes=" + std::to_string(need - 1)};
  DaemonProcess daemon(options);
  const auto session =
      Session::Open(RankOptions(daemon.socket(), 0, 1), SmallJob("big", 1), {Param(kElements)});
  ASSERT_TRUE(absl::IsResourceExhausted(session.status())) << session.status();
  EXPECT_NE(session.status().message().find("memory.budget_bytes"), absl::string_view::npos);
  EXPECT_FALSE(std::filesystem::exists(daemon.state_directory() + "/jobs/big"));
}

TEST(ResourceCases, ClientKilledFiveTimesOnATmpfsSizedForOne) {
  const Tmpfs tmpfs(JobBytes() + (256 << 10));
  ASSERT_TRUE(tmpfs.mounted());
  DaemonProcess::Options options;
  options.state_directory = tmpfs.state();
  options.flags = {"--memory.budget_bytes=1000000000"};
  DaemonProcess daemon(options);
  const uint64_t before = tmpfs.Free();
  for (int i = 0; i < 5; ++i) {
    // Each takes the whole directory for a job of its own, and dies before its weights are there.
    const std::string name = "job" + std::to_string(i);
    const int status = RawOpen(daemon, name, kElements, geteuid(), getegid(), "die");
    ASSERT_TRUE(WIFSIGNALED(status)) << "attempt " << i << " had no room";
    ASSERT_TRUE(daemon.AwaitLog("job " + name + ": deleted"));
    EXPECT_EQ(tmpfs.Free(), before) << "attempt " << i;
  }
  EXPECT_EQ(daemon.Info().planned_bytes(), 0u);
}

TEST(ResourceCases, MemlockLimitOf64KiB) {
  DaemonProcess::Options options;
  options.before_exec = [] {
    const rlimit limit{64 << 10, 64 << 10};
    setrlimit(RLIMIT_MEMLOCK, &limit);
  };
  DaemonProcess daemon(options);
  auto session = OpenRank(daemon.socket(), 0, 1, SmallJob("locked", 1), {Param(kElements)});
  const auto decision =
      TakeStep(session.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t) { return 1.0f; });
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_TRUE(session->Close().ok());
}

TEST(ResourceCases, DaemonWithUmask077AndAClientInItsGroup) {
  DaemonProcess::Options options;
  options.umask = 077;
  DaemonProcess daemon(options);
  for (const std::string suffix : {"", ".attach"}) {
    struct stat info {};
    ASSERT_EQ(stat((daemon.socket() + suffix).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0660u) << suffix;
  }
  // A client of another user, in the daemon's group only.
  const int status = RawOpen(daemon, "theirs", 100, 65534, getegid(), "stay");
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << daemon.Log();
}

TEST(ResourceCases, SecondDaemonOnTheSameStateDirectoryIsRefused) {
  DaemonProcess daemon;
  TempDir dir;
  const std::string command = Runfile("server/shardd") + " --listen.socket=" + dir.path() +
                              "/d.sock --store.directory=" + daemon.state_directory() + " 2>" +
                              dir.path() + "/log";
  EXPECT_NE(std::system(command.c_str()), 0);
  const std::string other = Runfile("server/shardd") + " --listen.socket=" + daemon.socket() +
                            " --store.directory=/dev/shm/shardd-test-other-" +
                            std::to_string(getpid()) + " 2>>" + dir.path() + "/log";
  EXPECT_NE(std::system(other.c_str()), 0);
  std::filesystem::remove_all("/dev/shm/shardd-test-other-" + std::to_string(getpid()));
  TempDir unused;
  EXPECT_TRUE(daemon.Alive());
  EXPECT_EQ(daemon.Info().sessions(), 1u);
}

// What a Kubernetes gRPC probe calls: grpc.health.v1.Health/Check of the whole server.
TEST(ResourceCases, AnswersHealthChecks) {
  DaemonProcess daemon;
  grpc::GenericStub stub(
      grpc::CreateChannel("unix:" + daemon.socket(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const grpc::Slice nothing("", size_t{0});
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &reply,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  ASSERT_TRUE(status.ok()) << status.error_message();
  grpc::Slice slice;
  ASSERT_TRUE(reply.DumpToSingleSlice(&slice).ok());
  EXPECT_EQ(std::string(slice.begin(), slice.end()), "\x08\x01");  // status: SERVING
}

TEST(ResourceCases, StateDirectoryThatIsNotTmpfsIsRefused) {
  TempDir dir("/tmp");
  struct statfs fs {};
  ASSERT_EQ(statfs(dir.path().c_str(), &fs), 0);
  const std::string command = Runfile("server/shardd") + " --listen.socket=" + dir.path() +
                              "/d.sock --store.directory=/proc/self 2>" + dir.path() + "/log";
  EXPECT_NE(std::system(command.c_str()), 0);
}

TEST(ResourceCases, JobAndStateOutliveTheirSessions) {
  DaemonProcess daemon;
  const JobOptions job = SmallJob("kept", 1);
  std::vector<float> master;
  {
    auto session = OpenRank(daemon.socket(), 0, 1, job, {Param(10)}, 1.0f);
    ASSERT_TRUE(TakeStep(session.get(), DType::kFloat32, [](uint32_t, size_t, uint64_t i) {
                  return static_cast<float>(i) - 4.5f;
                }).ok());
    master = ReadAll(session.get(), StateKind::kMaster, 0);
    EXPECT_TRUE(session->Close().ok());
  }
  auto session = OpenRank(daemon.socket(), 0, 1, job, {Param(10)});
  EXPECT_FALSE(session->initialising());
  EXPECT_EQ(session->next_step(), 2u);
  EXPECT_EQ(ReadAll(session.get(), StateKind::kMaster, 0), master);
  EXPECT_TRUE(session->Close().ok());
  session.reset();
  // Another configuration is refused, with the fields that differ.
  JobOptions other = job;
  other.max_norm = 2;
  const auto refused = Session::Open(RankOptions(daemon.socket(), 0, 1), other, {Param(11)});
  ASSERT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("max_norm: 0.0 there, 2.0 here"),
            absl::string_view::npos)
      << refused.status();
  EXPECT_NE(refused.status().message().find("shape (10) there, (11) here"),
            absl::string_view::npos);
}

TEST(ResourceCases, ResumeThatFindsNothingIsAnErrorUnlessAFreshStartIsAllowed) {
  DaemonProcess daemon;
  SessionOptions options = RankOptions(daemon.socket(), 0, 1);
  options.resume = Resume::kMust;
  const auto missing = Session::Open(options, SmallJob("none", 1), {Param(4)});
  EXPECT_TRUE(absl::IsNotFound(missing.status())) << missing.status();
  options.resume = Resume::kAuto;
  const auto fresh = Session::Open(options, SmallJob("none", 1), {Param(4)});
  EXPECT_TRUE(fresh.ok()) << fresh.status();
}

TEST(ResourceCases, DeletingAJobGivesItsMemoryBack) {
  DaemonProcess daemon;
  auto session = OpenRank(daemon.socket(), 0, 1, SmallJob("gone", 1), {Param(kElements)});
  EXPECT_EQ(daemon.DeleteJob("gone", false).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_GT(daemon.Info().planned_bytes(), kElements * 16);
  EXPECT_TRUE(daemon.DeleteJob("gone", true).ok());
  const auto after = session->WaitWeights(0);
  EXPECT_FALSE(after.ok());
  EXPECT_NE(after.status().message().find("deleted"), absl::string_view::npos) << after.status();
  EXPECT_EQ(daemon.Info().planned_bytes(), 0u);
  EXPECT_FALSE(std::filesystem::exists(daemon.state_directory() + "/jobs/gone"));
}

}  // namespace
}  // namespace shardd::test
