// Dotted paths of protobuf fields (groups[0].hyper.lr), and the nearest valid one
// to a path that someone mistyped. Used by config_json.
#ifndef SHARDD_PROTO_CONTRACT_CONFIG_PATH_H_
#define SHARDD_PROTO_CONTRACT_CONFIG_PATH_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardd::contract {

std::string JoinPath(const std::string& path, const std::string& name);

// A field that is not a message, in the message that holds it.
struct FieldRef {
  google::protobuf::Message* message = nullptr;
  const google::protobuf::FieldDescriptor* field = nullptr;
  int index = 0;  // of repeated fields
};

// The field that `path` names. InvalidArgument: no such field, or a message.
absl::StatusOr<const google::protobuf::FieldDescriptor*> FindLeaf(
    const google::protobuf::Descriptor* root, const std::string& path);

// The same in `root`, creating the messages on the way. InvalidArgument: also for
// an index beyond the number of elements.
absl::StatusOr<FieldRef> ResolvePath(google::protobuf::Message* root, const std::string& path);

// "PREFIX unknown key 'PATH'; did you mean 'NEAREST'?", or the valid names.
absl::Status UnknownPath(const google::protobuf::Descriptor* root, const std::string& path,
                         const std::string& prefix);

// Edits (insert, delete, replace, swap of neighbours) that turn a into b.
size_t EditDistance(const std::string& a, const std::string& b);

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_CONFIG_PATH_H_
