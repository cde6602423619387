// Looks at the machine for shardctl doctor.
#ifndef SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_
#define SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_

#include <string>
#include <utility>
#include <vector>

#include "client/cli/doctor_checks.h"

namespace shardd::cli {

// State directories under the paths that match `patterns` which hold jobs and whose lock is free:
// no daemon has them, whatever they are called. Only those of this user can be looked at.
std::vector<std::pair<std::string, uint64_t>> FindOrphans(const std::vector<std::string>& patterns);

// Everything but the daemon's part. `state_directory`: the daemon's; empty when
// none answers: then the one that a daemon of `uid` started now would use.
SystemFacts GatherFacts(uid_t uid, const std::string& state_directory);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_
