#include "trainer/progress.h"

#include <cstdlib>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd::trainer {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What is printed by a run of `steps` steps with a message after the second.
std::string Printed(bool terminal, bool enabled, uint64_t steps, int columns = 200) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* out = open_memstream(&text, &size);
  {
    Progress progress(
        {.out = out, .terminal = terminal, .enabled = enabled, .steps = steps, .columns = columns});
    for (uint64_t s = 1; s <= steps; ++s) {
      StepRecord record;
      record.step = s;
      record.loss = 2.5;
      progress.Step(record, 40960, 65);
      if (s == 2) progress.Message("a message");
    }
  }
  std::fclose(out);
  std::string result(text, size);
  std::free(text);
  return result;
}

TEST(Progress, LinesWhereThereIsNoTerminal) {
  const std::string text = Printed(false, true, 1000);
  EXPECT_THAT(text, HasSubstr("step 1/1000  loss 2.5000"));
  EXPECT_THAT(text, HasSubstr("\na message\n"));
  EXPECT_THAT(text, HasSubstr("40960 tokens/s  1:05 left\n"));
  EXPECT_THAT(text, Not(HasSubstr("\r")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 22);
}

TEST(Progress, ABarOnATerminal) {
  const std::string text = Printed(true, true, 4);
  EXPECT_THAT(text, HasSubstr("\r[============>           ] step 2/4"));
  EXPECT_THAT(text, HasSubstr("\na message\n\r["));
  EXPECT_EQ(text.back(), '\n');
  EXPECT_THAT(Printed(true, true, 4, 40), Not(HasSubstr("norm")));
}

TEST(Progress, MessagesAlways) { EXPECT_EQ(Printed(true, false, 4), "a message\n"); }

TEST(Progress, Durations) {
  EXPECT_EQ(Duration(-3), "0:00");
  EXPECT_EQ(Duration(59.6), "1:00");
  EXPECT_EQ(Duration(3723), "1:02:03");
}

}  // namespace
}  // namespace shardd::trainer
