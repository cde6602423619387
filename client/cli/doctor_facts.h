// Looks at the machine for shardctl doctor.
#ifndef SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_
#define SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_

#include <string>

#include "client/cli/doctor_checks.h"

namespace shardd::cli {

// Everything but the daemon's part. `state_directory`: the daemon's; empty when
// none answers: then the one that a daemon of `uid` started now would use.
SystemFacts GatherFacts(uid_t uid, const std::string& state_directory);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_DOCTOR_FACTS_H_
