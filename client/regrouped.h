// The payload of the Aborted status that tells a trainer to go on elsewhere.
#ifndef SHARDD_CLIENT_REGROUPED_H_
#define SHARDD_CLIENT_REGROUPED_H_

#include "absl/status/status.h"
#include "client/client.h"

namespace shardd {

// Aborted, with `regrouped` as GetRegrouped (client.h) reads it.
absl::Status RegroupedStatus(const Regrouped& regrouped);

}  // namespace shardd

#endif  // SHARDD_CLIENT_REGROUPED_H_
