#include "server/control/session_registry.h"

#include <unistd.h>

#include <set>

#include "gtest/gtest.h"

namespace shardd::control {
namespace {

TEST(SessionRegistryTest, SessionsOfSeveralDaemonsDiffer) {
  SessionRegistry one(8), other(8);
  std::set<uint64_t> nonces;
  for (int i = 0; i < 8; ++i) {
    for (SessionRegistry* registry : {&one, &other}) {
      const auto session = registry->Create(0, getpid(), {}, {});
      ASSERT_TRUE(session.ok()) << session.status();
      EXPECT_NE((*session)->nonce, 0u);
      EXPECT_LT((*session)->nonce, uint64_t{1} << 62);  // a key of epoll has one bit more
      EXPECT_TRUE(nonces.insert((*session)->nonce).second) << (*session)->nonce;
    }
  }
}

TEST(SessionRegistryTest, FoundByTokenUntilRemovedAndBoundedInNumber) {
  SessionRegistry registry(1);
  const auto session = registry.Create(0, getpid(), {}, {});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(absl::IsResourceExhausted(registry.Create(0, getpid(), {}, {}).status()));
  const auto found = registry.Find((*session)->token);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->get(), session->get());
  registry.Remove(**session);
  EXPECT_TRUE(absl::IsUnauthenticated(registry.Find((*session)->token).status()));
  EXPECT_TRUE(registry.Create(0, getpid(), {}, {}).ok());
}

}  // namespace
}  // namespace shardd::control
