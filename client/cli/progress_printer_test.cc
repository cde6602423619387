#include "client/cli/progress_printer.h"

#include <gtest/gtest.h>

#include <sstream>

namespace shardd::cli {
namespace {

TEST(ProgressPrinter, LinesForEachTenthAndEachStage) {
  std::ostringstream out;
  {
    ProgressPrinter printer(&out, ProgressStyle::kLines);
    printer.Show("waiting", 0, 0, 0.1);
    for (uint64_t done = 0; done <= 100; ++done) printer.Show("writing step 5", done, 100, 0.5);
  }
  const std::string text = out.str();
  EXPECT_EQ(text.find("waiting\nwriting step 5: 0 B of 100 B"), 0u) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 12) << text;
  EXPECT_NE(text.find("writing step 5: 100 B of 100 B"), std::string::npos) << text;
  EXPECT_EQ(text.find('\r'), std::string::npos);
}

TEST(ProgressPrinter, ABarThatIsRewritten) {
  std::ostringstream out;
  {
    ProgressPrinter printer(&out, ProgressStyle::kBar);
    printer.Show("writing step 5", 50, 100, 1);
    printer.Show("x", 0, 0, 0);
  }
  const std::string text = out.str();
  EXPECT_EQ(text.find("\rwriting step 5 [###############...............]  50% 50 B, 50 B/s"), 0u)
      << text;
  // What stood there is wiped out, and the line is ended.
  EXPECT_NE(text.find("\rx     "), std::string::npos);
  EXPECT_EQ(text.back(), '\n');
}

TEST(ProgressPrinter, Nothing) {
  std::ostringstream out;
  ProgressPrinter(&out, ProgressStyle::kNone).Show("x", 1, 2, 3);
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace shardd::cli
