// Runs the WebAssembly build of Perfetto's trace processor, as the Perfetto UI has it, outside a browser.
//
//   node processor.cjs ENGINE_BUNDLE < requests > replies
//
// ENGINE_BUNDLE is the UI's engine_bundle.js, with trace_processor.wasm beside it. Requests and replies are serialized
// TraceProcessorRpcStream messages, the protocol that the UI speaks with its worker.
const fs = require('fs');
const path = require('path');
const vm = require('vm');

const bundle = process.argv[2];

function fail(error) {
  // The bundle is one line of 150 KB, which node would print whole.
  console.error(String(error && error.message).slice(0, 400));
  process.exit(1);
}
process.on('uncaughtException', fail);

class FileRequest {
  open(_method, url) {
    this.file = path.join(path.dirname(bundle), path.basename(url));
  }
  send() {
    const data = fs.readFileSync(this.file);
    this.status = 200;
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
  }
}

// A worker's globals and nothing of node's, which the bundle would otherwise find and refuse.
const worker = {
  XMLHttpRequest: FileRequest, WorkerGlobalScope: class {}, importScripts() {},
  location: {href: 'file:///engine_bundle.js', protocol: 'file:', host: ''},
  console: {log() {}, warn() {}, error: console.error},
  TextDecoder, setTimeout, performance, URL, crypto,
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(bundle, 'utf8'), worker);

const port = {
  postMessage(reply) {
    for (let sent = 0; sent < reply.length;) sent += fs.writeSync(1, reply, sent);
  },
};
// The module is ready when the promises of its start have run.
setTimeout(() => {
  worker.onmessage({data: port});
  const Bytes = vm.runInContext('Uint8Array', worker);
  port.onmessage({data: new Bytes(fs.readFileSync(0))});
}, 20);
