#include "client/cli/doctor_checks.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "client/cli/doctor_facts.h"

namespace shardd::cli {
namespace {

using ::testing::HasSubstr;

// A machine that nothing is wrong with.
SystemFacts Fit() {
  SystemFacts facts;
  facts.uid = 1000;
  facts.memlock_bytes = kUnlimited;
  facts.swap_bytes = uint64_t{1} << 30;
  facts.memory_bytes = uint64_t{64} << 30;
  facts.state_directory = "/run/shardd/state";
  facts.state_on_tmpfs = true;
  facts.state_huge = "always";
  facts.state_total_bytes = uint64_t{32} << 30;
  facts.state_free_bytes = uint64_t{30} << 30;
  facts.systemd_runs = true;
  facts.remove_ipc = true;
  facts.online_cpus = facts.allowed_cpus = 8;
  facts.kernel = "6.1";
  facts.has_pidfd = facts.has_memfd = facts.has_populate = true;
  facts.version = facts.daemon_version = "0.1.0";
  return facts;
}

Finding Get(const SystemFacts& facts, const std::string& check) {
  for (const Finding& finding : Diagnose(facts)) {
    if (finding.check == check) return finding;
  }
  ADD_FAILURE() << "no check " << check;
  return {};
}

TEST(DoctorTest, NothingToSayOfAFitMachine) {
  for (const Finding& finding : Diagnose(Fit())) {
    EXPECT_EQ(finding.severity, Severity::kOk) << finding.check << ": " << finding.detail;
    EXPECT_EQ(finding.remedy, "");
  }
}

TEST(DoctorTest, OrphansAreFoundByTheirLock) {
  char root[] = "/dev/shm/doctor-test-XXXXXX";
  ASSERT_NE(mkdtemp(root), nullptr);
  const std::string path = root;
  for (const char* name : {"held", "orphan", "empty"}) {
    std::filesystem::create_directories(path + "/" + name + "/jobs/gpt");
    std::ofstream(path + "/" + name + "/lock") << "";
    if (std::string(name) != "empty")
      std::ofstream(path + "/" + name + "/jobs/gpt/state") << "state";
  }
  const int held = open((path + "/held/lock").c_str(), O_RDWR);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  const auto orphans = FindOrphans({path + "/*"});
  ASSERT_EQ(orphans.size(), 1u);
  EXPECT_EQ(orphans[0].first, path + "/orphan");
  EXPECT_GT(orphans[0].second, 0u);
  close(held);
  std::filesystem::remove_all(path);

  SystemFacts facts = Fit();
  facts.orphaned_state = orphans;
  const Finding finding = Get(facts, "orphaned state");
  EXPECT_EQ(finding.severity, Severity::kWarning);
  EXPECT_THAT(finding.detail, HasSubstr("/orphan"));
}

TEST(DoctorTest, EveryFindingHasARemedy) {
  SystemFacts facts;  // nothing is right
  facts.orphaned_state = {{"/dev/shm/shardd-1", 1}};
  facts.swap_bytes = 1;
  facts.uid = 1000;
  facts.systemd_runs = true;
  facts.state_directory = "/dev/shm/shardd-1000";
  facts.allowed_cpus = 4;
  facts.quota_cpus = 1.5;
  for (const Finding& finding : Diagnose(facts)) {
    EXPECT_NE(finding.severity, Severity::kOk) << finding.check;
    EXPECT_NE(finding.remedy, "") << finding.check;
    EXPECT_NE(finding.detail, "") << finding.check;
  }
}

TEST(DoctorTest, MemlockMattersOnlyWithSwap) {
  SystemFacts facts = Fit();
  facts.memlock_bytes = 64 << 10;
  EXPECT_EQ(Get(facts, "memlock").severity, Severity::kWarning);
  EXPECT_THAT(Get(facts, "memlock").detail, HasSubstr("64.0 KiB"));
  facts.swap_bytes = 0;
  EXPECT_EQ(Get(facts, "memlock").severity, Severity::kOk);
}

TEST(DoctorTest, StateDirectory) {
  SystemFacts facts = Fit();
  facts.state_huge = "";
  EXPECT_EQ(Get(facts, "huge pages").severity, Severity::kWarning);
  facts.state_on_tmpfs = false;
  EXPECT_EQ(Get(facts, "huge pages").severity, Severity::kProblem);
  facts = Fit();
  facts.state_free_bytes = 1 << 20;
  EXPECT_EQ(Get(facts, "state size").severity, Severity::kProblem);
  facts = Fit();
  facts.state_total_bytes = uint64_t{65} << 30;
  EXPECT_EQ(Get(facts, "state size").severity, Severity::kWarning);
}

TEST(DoctorTest, RemoveIpcThreatensOnlyUsersInDevShm) {
  SystemFacts facts = Fit();
  facts.state_directory = "/dev/shm/shardd-1000";
  EXPECT_EQ(Get(facts, "RemoveIPC").severity, Severity::kWarning);
  facts.uid = 999;
  EXPECT_EQ(Get(facts, "RemoveIPC").severity, Severity::kOk);
  facts.uid = 1000;
  facts.remove_ipc = false;
  EXPECT_EQ(Get(facts, "RemoveIPC").severity, Severity::kOk);
}

TEST(DoctorTest, QuotaBelowTheCpus) {
  SystemFacts facts = Fit();
  facts.quota_cpus = 8;
  EXPECT_EQ(Get(facts, "cpuset").severity, Severity::kOk);
  facts.quota_cpus = 2.5;
  EXPECT_EQ(Get(facts, "cpuset").severity, Severity::kWarning);
}

TEST(DoctorTest, Versions) {
  SystemFacts facts = Fit();
  facts.daemon_version = "0.0.9";
  EXPECT_EQ(Get(facts, "versions").severity, Severity::kWarning);
}

TEST(ParseTest, RemoveIpc) {
  EXPECT_EQ(ParseRemoveIpc(""), std::nullopt);
  EXPECT_EQ(ParseRemoveIpc("[Login]\n#RemoveIPC=no\n"), std::nullopt);
  EXPECT_EQ(ParseRemoveIpc("[Login]\nRemoveIPC=no\n"), false);
  EXPECT_EQ(ParseRemoveIpc("RemoveIPC = yes\nRemoveIPC=off\n"), false);
  EXPECT_EQ(ParseRemoveIpc("RemoveIPC=off\nRemoveIPC=1"), true);
  EXPECT_EQ(ParseRemoveIpc("RemoveIPCs=off"), std::nullopt);
}

TEST(ParseTest, MountOfAPath) {
  const std::string text =
      "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
      "23 22 0:20 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw\n"
      "24 22 0:21 / /run/shardd/state rw shared:3 master:1 - tmpfs shardd-state rw,huge=always\n"
      "25 22 0:22 / /run/shardd/state2 rw - tmpfs x rw,huge=advise\n"
      "garbage\n";
  EXPECT_EQ(FindMount(text, "/run/shardd/state")->huge, "always");
  EXPECT_EQ(FindMount(text, "/run/shardd/state2/x")->huge, "advise");
  EXPECT_EQ(FindMount(text, "/dev/shm/shardd-1")->type, "tmpfs");
  EXPECT_EQ(FindMount(text, "/dev/shm/shardd-1")->huge, "");
  EXPECT_EQ(FindMount(text, "/dev/shmem")->type, "ext4");
  EXPECT_FALSE(FindMount("", "/x").has_value());
}

TEST(ParseTest, CpuMax) {
  EXPECT_EQ(ParseCpuMax("max 100000\n"), std::nullopt);
  EXPECT_EQ(ParseCpuMax("250000 100000\n"), 2.5);
  EXPECT_EQ(ParseCpuMax(""), std::nullopt);
  EXPECT_EQ(ParseCpuMax("1 0"), std::nullopt);
}

TEST(FactsTest, OfThisMachine) {
  SystemFacts facts = GatherFacts(getuid(), "/dev/shm/not/there");
  EXPECT_TRUE(facts.has_memfd);
  EXPECT_TRUE(facts.has_pidfd);
  EXPECT_TRUE(facts.state_on_tmpfs);
  EXPECT_GT(facts.state_total_bytes, 0);
  EXPECT_GT(facts.memory_bytes, 0);
  EXPECT_GE(facts.online_cpus, 1);
  EXPECT_LE(facts.allowed_cpus, facts.online_cpus);
  EXPECT_EQ(GatherFacts(42, "").state_directory.rfind("/", 0), 0);
}

}  // namespace
}  // namespace shardd::cli
