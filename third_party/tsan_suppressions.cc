// What ThreadSanitizer is not to report, linked into whatever links gRPC. Debian's
// libgrpc is not instrumented, so its locks are not seen; but parts of it are inline
// in its headers, compiled and instrumented with our code, and seem to race.
//
// race_top looks at the innermost function alone. The others name gRPC's own batch
// and completion objects, below which only gRPC and the deletion of a finished call
// run (FinishOnlyReactor: a request that does not parse); no handler of ours does.
#ifdef SHARDD_TSAN
extern "C" const char* __tsan_default_suppressions() {
  return "race_top:grpc::\n"
         "race:grpc::internal::CallbackWithSuccessTag::\n"
         "race:grpc::internal::CallOpSet<\n"
         "race:grpc::internal::InterceptorBatchMethodsImpl::\n"
         "race:grpc::internal::FinishOnlyReactor<\n"
         "race:::ServerCallbackUnaryImpl::CallOnDone\n"
         "race:::ServerCallbackWriterImpl::CallOnDone\n"
         "race:::ServerCallbackReaderWriterImpl::CallOnDone\n"
         "race:grpc::ServerUnaryReactor::InternalBindCall\n"
         "race:::PreBindBacklog::\n"
         "race:grpc::ByteBuffer::\n";
}
#endif
