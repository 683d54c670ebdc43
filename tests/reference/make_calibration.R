# Writes api_apiclus1_weights.csv, api_apiclus1_rake_margins.csv, api_calibration.json, small20_solutions_R.csv and
# small20_R.json, the last two from small20.csv. Run: Rscript make_calibration.R
suppressPackageStartupMessages({library(survey); library(jsonlite); library(sampling); library(quadprog)})
options(digits=17)
w17 <- function(df,f) write.csv(format(df,digits=17,trim=TRUE),f,row.names=FALSE,quote=FALSE)
eps <- 1e-13
# Schools of 15 districts, calibrated to totals of all 6194 schools of California
data(api)
base <- svydesign(id=~dnum, weights=~pw, data=apiclus1, fpc=~fpc)
pop <- c(`(Intercept)`=6194, stypeH=755, stypeM=1018); pop2 <- c(pop, api99=3914069)
stopifnot(nrow(apipop)==6194, sum(apipop$stype=="H")==755, sum(apipop$stype=="M")==1018, sum(apipop$api99)==3914069)
summ <- function(name,d){ w <- weights(d); g <- w/weights(base)
  t1 <- svytotal(~enroll,d); m1 <- svymean(~api00,d); t2 <- svytotal(~stype,d)
  list(name=name,n=length(w),sum_w=sum(w),sum_w2=sum(w^2),ess_kish=sum(w)^2/sum(w^2),w_min=min(w),w_max=max(w),g_min=min(g),g_max=max(g),
       q25=unname(quantile(w,.25)),q50=unname(quantile(w,.5)),q75=unname(quantile(w,.75)),
       total_enroll=unname(coef(t1)),se_total_enroll=unname(SE(t1)[1]),mean_api00=unname(coef(m1)),se_mean_api00=unname(as.numeric(SE(m1))),
       stype_totals=as.list(coef(t2)), eta=as.numeric(attr(attr(d,"postStrata"),"eta")))}
out <- list(); W <- list()
for (pp in list(list(f=~stype,p=pop,n="stype"),list(f=~stype+api99,p=pop2,n="stype_api99"))) {
  L <- list(
   linear=calibrate(base,pp$f,pp$p,calfun="linear",epsilon=eps,maxit=200),
   linear_bounded_0.6_1.6=calibrate(base,pp$f,pp$p,calfun="linear",bounds=c(0.6,1.6),epsilon=eps,maxit=500),
   raking=calibrate(base,pp$f,pp$p,calfun="raking",epsilon=eps,maxit=200),
   logit_0.5_2=calibrate(base,pp$f,pp$p,calfun="logit",bounds=c(0.5,2),epsilon=eps,maxit=500))
  for (k in names(L)) { nm <- paste("apiclus1",pp$n,k,sep="__"); out[[nm]] <- summ(nm,L[[k]]); W[[nm]] <- weights(L[[k]]) }
}
out$apiclus1__design <- summ("apiclus1__design",base)
df <- apiclus1
w17(data.frame(cds=df$cds,dnum=df$dnum,stype=df$stype,api99=df$api99,api00=df$api00,enroll=df$enroll,pw=df$pw,fpc=df$fpc,as.data.frame(W,check.names=FALSE)),"api_apiclus1_weights.csv")
# iterative proportional fitting by margins
rr <- rake(base,list(~stype,~sch.wide),list(data.frame(stype=c("E","H","M"),Freq=c(4421,755,1018)),data.frame(sch.wide=c("No","Yes"),Freq=c(1072,5122))),control=list(maxit=200,epsilon=1e-12,verbose=FALSE))
out$apiclus1_rake_margins <- summ("apiclus1_rake_margins",rr)
w17(data.frame(stype=df$stype,sch.wide=df$sch.wide,pw=df$pw,w=weights(rr)),"api_apiclus1_rake_margins.csv")
write_json(out,"api_calibration.json",auto_unbox=TRUE,digits=NA,pretty=TRUE,null="null")
# 20 rows
x <- read.csv("small20.csv")
A <- as.matrix(cbind(1,x[,c("x1","x2","x3")])); N <- sum(x$d)
mu <- c(0.60,1.20,0.65)                       # target means
tot <- N*c(1,mu)
des <- svydesign(ids=~1,weights=~d,data=x)
popv <- setNames(tot,c("(Intercept)","x1","x2","x3"))
res <- list(); S <- list()
add <- function(k,w){ w <- as.numeric(w); res[[k]] <<- w; S[[k]] <<- list(max_abs_constraint=max(abs(colSums(w*A)-tot)),min=min(w),max=max(w),min_g=min(w/x$d),max_g=max(w/x$d),ess=sum(w)^2/sum(w^2),chi2=sum((w-x$d)^2/x$d),kl=sum(ifelse(w>0,w*log(w/x$d),0))) }
greg <- function(...) weights(calibrate(des,~x1+x2+x3,popv,epsilon=eps,...))
add("survey_linear",greg(calfun="linear"))
add("survey_linear_nonneg",greg(calfun="linear",bounds=c(0,Inf),maxit=500))
add("survey_linear_0.2_2.5",tryCatch(greg(calfun="linear",bounds=c(0.2,2.5),maxit=2000),error=function(e) rep(NA,20)))
add("survey_raking",greg(calfun="raking",maxit=500))
add("survey_logit_0.05_4",greg(calfun="logit",bounds=c(0.05,4),maxit=2000))
add("sampling_linear",calib(A,x$d,tot,method="linear")*x$d)
add("sampling_raking",calib(A,x$d,tot,method="raking",max_iter=1000)*x$d)
add("sampling_logit_0.05_4",calib(A,x$d,tot,method="logit",bounds=c(0.05,4),max_iter=2000)*x$d)
# min sum (w-d)^2/d with A'w=tot, w>=0; and min sum (q-1/n)^2 with sum q=1, X'q=mu, with and without q>=0
add("quadprog_chi2_nonneg",solve.QP(diag(1/x$d),rep(1,20),cbind(A,diag(20)),c(tot,rep(0,20)),meq=4)$solution)
q2 <- solve.QP(diag(20),rep(1/20,20),cbind(A,diag(20)),c(1,mu,rep(0,20)),meq=4)$solution
res$quadprog_uniform_nonneg_q <- q2; S$quadprog_uniform_nonneg_q <- list(sum=sum(q2),means=colSums(q2*A)[-1],min=min(q2),max=max(q2),ess=1/sum(q2^2),n_zero=sum(q2<1e-12))
res$quadprog_uniform_unrestricted_q <- solve.QP(diag(20),rep(1/20,20),A,c(1,mu),meq=4)$solution
w17(data.frame(x,as.data.frame(res,check.names=FALSE)),"small20_solutions_R.csv")
write_json(list(target_means=mu,total=N,summary=S),"small20_R.json",auto_unbox=TRUE,digits=NA,pretty=TRUE)
writeLines(capture.output(sessionInfo()),"calibration_session.txt")
