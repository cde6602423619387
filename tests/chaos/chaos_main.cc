// Kills daemons and ranks of a job until the time is up, and compares the bits of every run with
// those of one that nobody disturbed. tests/chaos/run builds and starts it.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "tests/chaos/post_mortem.h"
#include "tests/chaos/round.h"

namespace shardd::test {
namespace {

constexpr char kUsage[] =
    "usage: tests/chaos/run [--seconds=S] [--seed=N] [--daemons=D] [--ranks=R] [--steps=N]\n"
    "                       [--journal] [--keep]\n\n"
    "Runs small jobs of R ranks on D daemons and, for S seconds (120), kills daemons and ranks\n"
    "at moments drawn uniformly, some at failpoints, some while they recover; freezes some; and\n"
    "with --journal loses whole machines: memory, and what the disk was not told to keep. Every\n"
    "run must end with the bits of an undisturbed one, and no rank may see a committed step\n"
    "taken back. Prints kills by phase and how long recoveries took.\n"
    "  --seed=N   the same choices again (default: drawn, and printed)\n"
    "  --keep     leave the logs of the last run\n"
    "Exit code: 0 when every run was right and every phase was met by a kill; with --any-phases\n"
    "(for short runs) when every run was right.\n";

struct Options {
  RoundOptions round;
  double seconds = 120;
  bool any_phases = false;
  uint64_t seed = 0;
};

bool Parse(int argc, char** argv, Options* options) {
  RoundOptions& round = options->round;
  std::map<std::string, std::string*> paths = {{"shardd", &round.programs.shardd},
                                               {"shardctl", &round.programs.shardctl},
                                               {"rank", &round.programs.rank},
                                               {"certs", &round.programs.certs}};
  std::map<std::string, uint32_t*> numbers = {
      {"daemons", &round.daemons}, {"ranks", &round.ranks}, {"steps", &round.steps}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    const std::string key = name.size() > 2 ? name.substr(2) : "";
    bool good = true;
    if (name == "--journal") {
      round.journal = true;
    } else if (name == "--any-phases") {
      options->any_phases = true;
    } else if (name == "--keep") {
      round.keep = true;
    } else if (name == "--seconds") {
      good = absl::SimpleAtod(value, &options->seconds) && options->seconds > 0;
    } else if (name == "--seed") {
      good = absl::SimpleAtoi(value, &options->seed);
    } else if (paths.contains(key)) {
      *paths[key] = value;
    } else if (numbers.contains(key)) {
      good = absl::SimpleAtoi(value, numbers[key]) && *numbers[key] > 0;
    } else {
      good = false;
    }
    if (!good) {
      std::fprintf(stderr, "chaos: unknown or wrong argument '%s'\n%s", argv[i], kUsage);
      return false;
    }
  }
  round.slots = std::max(round.slots, round.ranks);
  return true;
}

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

// What was done; false when some phase was never met.
bool Report(const Tally& tally, const Options& options) {
  bool all = true;
  std::vector<std::string> phases(kDaemonPhaseNames.begin(), kDaemonPhaseNames.end());
  phases.insert(phases.end(), kRankPhaseNames.begin(), kRankPhaseNames.end());
  std::printf("%-32s %8s %8s\n", "killed while", "uniform", "aimed");
  for (const std::string& phase : phases) {
    const auto found = tally.kills.find(phase);
    const Tally::Kills kills = found == tally.kills.end() ? Tally::Kills() : found->second;
    std::printf("%-32s %8lu %8lu\n", phase.c_str(), kills.uniform, kills.aimed);
    // A rank concludes once in hundreds of steps.
    all = all && (kills.uniform + kills.aimed > 0 || phase == "rank concluding");
  }
  const double share = tally.Uniform() == 0 ? 0
                                            : static_cast<double>(tally.in_step) /
                                                  static_cast<double>(tally.Uniform());
  std::printf(
      "chaos: seed=%lu daemons=%u rounds=%lu steps=%lu kills=%lu in_step=%.0f%% machines_lost=%lu "
      "rank_freezes=%lu daemon_freezes=%lu recoveries=%zu recovery_median=%.3fs "
      "recovery_max=%.3fs\n",
      options.seed, options.round.daemons, tally.rounds, tally.steps, tally.Total(), 100 * share,
      tally.machines_lost, tally.rank_freezes, tally.daemon_freezes, tally.recovery_seconds.size(),
      Quantile(tally.recovery_seconds, 0.5), Quantile(tally.recovery_seconds, 1));
  return all;
}

int Run(Options options) {
  if (options.seed == 0) options.seed = std::random_device()() | 1;
  std::printf("chaos: seed %lu\n", options.seed);
  std::fflush(stdout);
  std::string failure;
  // One per kind of round: how ranks hold weights does not change the bits.
  const std::string expected =
      Round(options.round, options.seed).Run(nullptr, absl::Now(), &failure);
  if (expected.empty()) {
    std::fprintf(stderr, "chaos: the undisturbed run failed: %s\n", failure.c_str());
    return 1;
  }
  const absl::Time until = absl::Now() + absl::Seconds(options.seconds);
  Tally tally;
  std::mt19937_64 rounds(options.seed);
  while (absl::Now() < until) {
    RoundOptions round = options.round;
    round.stage = static_cast<uint32_t>(rounds() % 4);
    round.private_weights = rounds() % 2 == 0;
    const std::string got = Round(round, rounds()).Run(&tally, until, &failure);
    if (got != expected) {
      std::fprintf(stderr, "chaos: seed %lu, round %lu (stage %u, %s weights): %s\n", options.seed,
                   tally.rounds + 1, round.stage, round.private_weights ? "private" : "shared",
                   failure.empty() ? ("bits differ: " + got + " instead of " + expected).c_str()
                                   : failure.c_str());
      Report(tally, options);
      return 1;
    }
    if (isatty(2)) {
      std::fprintf(stderr, "\rchaos: %lu kills, %.0f s left   ", tally.Total(),
                   std::max(0.0, absl::ToDoubleSeconds(until - absl::Now())));
    }
  }
  if (isatty(2)) std::fprintf(stderr, "\n");
  if (!Report(tally, options) && !options.any_phases) {
    std::fprintf(stderr, "chaos: some phase was never met by a kill; run it for longer\n");
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace shardd::test

int main(int argc, char** argv) {
  if (argc > 1 && (std::strcmp(argv[1], "-h") == 0 || std::strcmp(argv[1], "--help") == 0)) {
    std::fputs(shardd::test::kUsage, stdout);
    return 0;
  }
  shardd::test::Options options;
  if (!shardd::test::Parse(argc, argv, &options)) return 2;
  return shardd::test::Run(options);
}
